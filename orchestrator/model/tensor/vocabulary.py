"""Embeddings, and the output layers with as many rows, divided by rows: each rank has some of the words.

What such a module returns is whole on every rank: rows are summed, outputs are gathered. So what a model, a loss or a
metric does with them does not matter, but the weights must be read by these modules alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orchestrator.compat.modules import calls_through
from orchestrator.compat.torch import FakeTensor, TorchDispatchMode, is_view_operator, storage_key
from orchestrator.model.batch import tensors_in
from orchestrator.model.tensor.peers import Peers
from orchestrator.model.tensor.region import enter, leave, part_of
from orchestrator.planning.placement import AxisCut

ROWS = AxisCut(over="tensor")


def vocabularies(model: nn.Module, blocks: Collection[nn.Module], count: int) -> dict[str, nn.Module]:
    """Return the embeddings and output layers outside of ``blocks`` that can be divided into ``count`` parts, by name.

    All modules that have one weight are among them, or none.
    """
    inside = {module for block in blocks for module in block.modules()}
    owners: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    rows = {module.num_embeddings for module in model.modules() if _is_embedding(module)}
    candidates = {
        module
        for module in model.modules()
        if module not in inside
        and (_is_embedding(module) or (type(module) is nn.Linear and module.out_features in rows))
        and len(module.get_parameter("weight")) % count == 0
    }
    fitting = {m for m in candidates if all({*owners[p]} <= candidates for p in m.parameters(recurse=False))}
    return {name: module for name, module in model.named_modules() if module in fitting}


def _is_embedding(module: nn.Module) -> bool:
    plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    return plain and not module.sparse and module.max_norm is None and not module.scale_grad_by_freq


class DirectUses:
    """Finds weights that are read while none of their modules runs.

    Attributes:
        found: the modules whose weights are.
    """

    def __init__(self, modules: Collection[nn.Module]):
        self.found: set[nn.Module] = set()
        self._owners: dict[int, list[nn.Module]] = {}
        for module in modules:
            self._owners.setdefault(storage_key(module.get_parameter("weight").untyped_storage()), []).append(module)
        self._together = {module: owners for owners in self._owners.values() for module in owners}
        self._running: list[nn.Module] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the operations in the block."""
        self._running.clear()
        with calls_through(self._call), Reads(self._see):
            yield

    def _call(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if module in self._together and not isinstance(module.weight, FakeTensor):
            self.found |= {*self._together[module]}  # what is called with other tensors cannot be watched
        self._running.append(module)
        try:
            return original(module, *args, **kwargs)
        finally:
            self._running.pop()

    def _see(self, tensor: Tensor) -> None:
        owners = self._owners.get(storage_key(tensor.untyped_storage()), [])
        if not any(owner in self._running for owner in owners):
            self.found |= {*owners}


class Reads(TorchDispatchMode):
    """Calls ``see`` with each tensor whose values an operation reads."""

    def __init__(self, see: Callable[[Tensor], None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_view_operator(func):
            for tensor in tensors_in((args, kwargs)):
                self._see(tensor)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def divide_rows(model: nn.Module, names: Sequence[str], *, index: int, count: int, peers: Peers) -> None:
    """Leave the rows of the part number ``index`` of ``count`` in modules of :func:`vocabularies`."""
    parts: dict[Tensor, nn.Parameter] = {}
    for name in names:
        module = model.get_submodule(name)
        for attribute, whole in list(module.named_parameters(recurse=False)):
            if whole not in parts:
                parts[whole] = part_of(whole, ROWS, index=index, count=count)
            setattr(module, attribute, parts[whole])
        kind: type[_Rows] = _Embedding if isinstance(module, nn.Embedding) else _Output
        module.__class__ = type(type(module).__name__, (kind, type(module)), {"__module__": type(module).__module__})
        assert isinstance(module, _Rows)
        module.index, module.count, module.peers = index, count, peers


class _Rows(nn.Module):
    """Rows of a module. Its class has become a subclass of this one and of what it was."""

    weight: nn.Parameter
    index: int
    count: int
    peers: Peers


class _Embedding(_Rows):
    padding_idx: int | None

    def forward(self, words: Tensor) -> Tensor:
        size = len(self.weight)
        own = words - self.index * size
        here = (own >= 0) & (own < size)
        padding = None if self.padding_idx is None else self.padding_idx - self.index * size
        if padding is not None and not 0 <= padding < size:
            padding = None
        rows = F.embedding(own.clamp(0, size - 1), self.weight, padding)
        return leave(rows * here[..., None], self.peers)


class _Output(_Rows):
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        part = F.linear(enter(x, self.peers), self.weight, self.bias)
        out: Tensor = _Gathered.apply(part, self.index, self.count, self.peers)
        return out


class _Gathered(torch.autograd.Function):
    """The parts of all ranks, along the last axis, whose gradients are the same on all of them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, index: int, count: int, peers: Peers) -> Tensor:
        ctx.index, ctx.size, ctx.peers = index, part.shape[-1], peers
        peers.cross(inside=False)
        return peers.gather(part, count, axis=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.peers.cross(inside=True)
        own = gradient.narrow(-1, ctx.index * ctx.size, ctx.size)
        return own.contiguous(), None, None, None
