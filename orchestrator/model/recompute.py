"""Activation checkpointing: blocks whose forward pass runs again in the backward pass, instead of keeping activations.

Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from orchestrator.compat.torch import FakeTensor, own_buffers
from orchestrator.model.batch import tensors_in


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


def recomputing(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a constructor whose model recomputes its blocks in the backward pass."""

    def built() -> nn.Module:
        model = build()
        blocks = blocks_of(model)
        classes = {kind: _recomputed(kind) for kind in map(type, blocks)}
        for block in blocks:
            # The class and not the instance, because a copy of a module has its class, and its own parameters.
            block.__class__ = classes[type(block)]
        return model

    return built


def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of ``kind`` whose instances keep only the inputs of their forward pass."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = functools.partial(kind.forward, self, **kwargs)
        if not torch.is_grad_enabled() or any(isinstance(t, FakeTensor) for t in tensors_in((args, kwargs))):
            return plain(*args)
        contexts = contextlib.nullcontext(), _BufferCopies(self)
        return checkpoint(plain, *args, use_reentrant=False, context_fn=lambda: contexts)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


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
