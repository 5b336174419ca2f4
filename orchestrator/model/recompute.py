"""Activation checkpointing: blocks whose forward pass runs again in the backward pass, instead of keeping activations.

Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost". Selective: Korthikanti et al., MLSys 2023, "Reducing
Activation Recomputation in Large Transformer Models".
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from orchestrator.compat.torch import FakeTensor, own_buffers
from orchestrator.model.batch import tensors_in

_KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.convolution.default,
    }
)
"""The operators whose results ``selective`` keeps. None of them is random: one that is left out of the recomputation
would let those after it draw other numbers."""


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


def recomputing(build: Callable[[], nn.Module], *, selective: bool = False) -> Callable[[], nn.Module]:
    """Return a constructor whose model recomputes its blocks in the backward pass.

    ``selective``: except for the results of matrix products and convolutions, which are kept.
    """

    def built() -> nn.Module:
        model = build()
        blocks = blocks_of(model)
        classes = {kind: _recomputed(kind, selective=selective) for kind in map(type, blocks)}
        for block in blocks:
            # The class and not the instance, because a copy of a module has its class, and its own parameters.
            block.__class__ = classes[type(block)]
        return model

    return built


def _recomputed(kind: type[nn.Module], *, selective: bool) -> type[nn.Module]:
    """Return a subclass of ``kind`` whose instances keep the inputs of their forward pass, and what is selected."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = functools.partial(kind.forward, self, **kwargs)
        if not torch.is_grad_enabled() or any(isinstance(t, FakeTensor) for t in tensors_in((args, kwargs))):
            return plain(*args)

        def contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
            if not selective:
                return contextlib.nullcontext(), _BufferCopies(self)
            keeping, using = create_selective_checkpoint_contexts(_policy)
            return keeping, _both(_BufferCopies(self), using)

        return checkpoint(plain, *args, use_reentrant=False, context_fn=contexts)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _both(
    outer: contextlib.AbstractContextManager[Any], inner: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with outer, inner:
        yield


class _BufferCopies(contextlib.AbstractContextManager[None]):
    """Lets a forward pass change copies of a block's buffers, such as running statistics, which count a batch once.

    It is entered in each recomputation, of which a backward pass in halves has two.
    """

    def __init__(self, block: nn.Module):
        self._block = block
        self._originals: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []

    def __enter__(self) -> None:
        self._originals = [(own_buffers(module), dict(own_buffers(module))) for module in self._block.modules()]
        for buffers, originals in self._originals:
            buffers.update({name: None if t is None else t.clone() for name, t in originals.items()})

    def __exit__(self, *error: object) -> None:
        for buffers, originals in self._originals:
            buffers.update(originals)
        self._originals = []
