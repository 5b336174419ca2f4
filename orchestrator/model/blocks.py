"""The repeated blocks of a model, such as the layers of a transformer, which may run in other ways than the rest."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import torch
from torch import nn

from orchestrator.compat.torch import FakeTensor
from orchestrator.model.batch import tensors_in
from orchestrator.model.recompute import Selection, recomputed

ForwardPass = Callable[..., Any]
"""A forward pass that is called with the module and its inputs."""


class Block(nn.Module):
    """A block of a model. The class of the block has become a subclass of this one and of what it was.

    The class and not the instance, because a copy of a module has its class, and its own parameters.

    Attributes:
        kind: the class that the job has given the block.
        recomputes: what is computed again in the backward pass.
        compiled: the compiled forward pass of ``kind``; None if it runs as it is.
        recomputes_fakes: whether a forward pass with fake tensors keeps no more than others do.
    """

    kind: ClassVar[type[nn.Module]]
    recomputes: ClassVar[Selection]
    compiled: ForwardPass | None = None
    recomputes_fakes = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of ``kind``. With fake tensors, it runs as the job has written it."""
        is_fake = any(isinstance(t, FakeTensor) for t in tensors_in((args, kwargs)))
        compiled = None if is_fake else self.compiled
        run = functools.partial(compiled or self.kind.forward, self, **kwargs)
        recomputes = self.recomputes != "none" and torch.is_grad_enabled() and (self.recomputes_fakes or not is_fake)
        if not recomputes:
            return run(*args)
        return recomputed(run, *args, block=self, selective=self.recomputes == "selective")


def likeness(block: nn.Module) -> Hashable:
    """Return a value that is equal for blocks that compute alike, with other numbers in their tensors."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    kind = block.kind if isinstance(block, Block) else type(block)
    return kind, repr(block), *((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the outermost repeated blocks of a model.

    They are the children of an ``nn.ModuleList`` or ``nn.Sequential`` that have the type of another child and have
    children themselves: a single operation keeps little more than its input, which a block keeps too.
    """
    children = [child for child in model.children() if next(child.children(), None) is not None]
    repeated: set[nn.Module] = set()
    if isinstance(model, (nn.ModuleList, nn.Sequential)):
        count = Counter(type(child) for child in children if not isinstance(child, (nn.ModuleList, nn.Sequential)))
        repeated = {child for child in children if count[type(child)] > 1}
    return [b for child in children for b in ([child] if child in repeated else blocks_of(child))]


def with_blocks(build: Callable[[], nn.Module], *, recomputes: Selection = "none") -> Callable[[], nn.Module]:
    """Return a constructor whose model has a :class:`Block` in place of each repeated block."""

    def built() -> nn.Module:
        model = build()
        blocks = blocks_of(model)
        classes = {kind: _block_class(kind, recomputes) for kind in map(type, blocks)}
        for block in blocks:
            block.__class__ = classes[type(block)]
        return model

    return built


def _block_class(kind: type[nn.Module], recomputes: Selection) -> type[nn.Module]:
    return type(kind.__name__, (Block, kind), {"kind": kind, "recomputes": recomputes, "__module__": kind.__module__})
