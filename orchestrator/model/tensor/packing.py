"""Linear layers whose outputs are several things, one after another: where the code of a block separates these.

Queries, keys and values of one projection, or the gate of an MLP beside what it gates, are views of its output, each of
some of its places. A rank needs a part of each of them.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.torch import TorchDispatchMode, storage_key
from orchestrator.model.batch import tensors_in
from orchestrator.model.tensor.region import Packed, is_linear
from orchestrator.model.tensor.sample import BlockCall


@torch.no_grad()
def packed_outputs(block: nn.Module, call: BlockCall) -> Packed:
    """Return the sizes of what follows one another in the outputs of linear layers, for those that are packed.

    Args:
        block: a block with real tensors.
        call: what it is called with.
    """
    watch = _Views()
    layers = {name: module for name, module in block.named_modules() if is_linear(module)}
    outputs: dict[str, Tensor] = {}

    def see(name: str) -> Any:
        return lambda module, args, out: outputs.setdefault(name, watch.begin(out))

    handles = [module.register_forward_hook(see(name)) for name, module in layers.items()]
    try:
        with watch:
            call.run(block)
    finally:
        for handle in handles:
            handle.remove()
    borders = {name: sorted({0, out.shape[-1], *watch.borders_of(out)}) for name, out in outputs.items()}
    sizes = {name: tuple(b - a for a, b in itertools.pairwise(found)) for name, found in borders.items()}
    return {name: found for name, found in sizes.items() if len(found) > 1}


class _Views(TorchDispatchMode):
    """Sees which parts of some tensors are taken as views, along their last axis."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, tuple[int, set[int]]] = {}

    def begin(self, tensor: Tensor) -> Tensor:
        """Watch the views of a tensor, and return it."""
        self._seen.setdefault(_key(tensor), (tensor.shape[-1], set()))
        return tensor

    def borders_of(self, tensor: Tensor) -> set[int]:
        """Return where the views of a tensor begin and end."""
        return self._seen[_key(tensor)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for whole in tensors_in(args)[:1]:
            size, borders = self._seen.get(_key(whole), (0, set()))
            if size and _places(whole, size) == (0, size):
                views = (view for view in tensors_in(found) if _key(view) == _key(whole))
                borders |= {place for view in views for place in _places(view, size) or ()}
        return found


def _key(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _places(view: Tensor, size: int) -> tuple[int, int] | None:
    """Return the first of ``size`` places along the last axis that a view has, and the one after the last.

    None if there are gaps between its places.
    """
    inner = [(n, stride) for n, stride in zip(view.shape, view.stride(), strict=True) if stride < size]
    count, first = 1 + sum((n - 1) * stride for n, stride in inner), int(view.storage_offset()) % size
    return (first, first + count) if math.prod(n for n, _ in inner) == count else None
