"""What a block has for each of its heads, or for each feature inside of a pair, beside its linear layers.

Examples are sinks, temperatures, the slopes of ALiBi, tables of relative positions, and the vectors of IA3. Parameters
are cut with the heads. Buffers, and what a module is called with, are whole, and a rank computes with its part of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestrator.compat.modules import own_buffers
from orchestrator.model.batch import map_leaves, tensors_in
from orchestrator.model.peers import Peers
from orchestrator.planning.placement import AxisCut

if TYPE_CHECKING:
    from orchestrator.model.tensor.block_calls import BlockCall

MOST_COMBINATIONS = 8
"""The combinations of cuts that are tried, if nothing says how many heads there are."""

Place = int | str
"""The position or the name of an argument."""


@dataclass(frozen=True)
class Heads:
    """Where heads are in a tensor: along an axis, or after the samples along the first one if it is ``None``."""

    axis: int | None
    count: int

    def are_in(self, tensor: Tensor) -> bool:
        """Return whether a tensor has all heads."""
        return len(tensor) % self.count == 0 if self.axis is None else tensor.shape[self.axis] == self.count

    def part(self, whole: Tensor, index: int, parts: int) -> Tensor:
        """Return the heads of one of several ranks."""
        size = self.count // parts
        if self.axis is None:
            own: Tensor = whole.unflatten(0, (-1, self.count)).narrow(1, index * size, size).flatten(0, 1)
            return own
        return whole.narrow(self.axis, index * size, size)


@dataclass(frozen=True, kw_only=True)
class HeadCuts:
    """What is cut with the heads of a block.

    Attributes:
        parameters: how parameters are cut, by name.
        buffers: the axis of each buffer of which a rank reads its part, by name.
        arguments: where the heads are in what modules are called with. A rank reads its part, unless it is one already.
    """

    parameters: Mapping[str, AxisCut] = field(default_factory=dict)
    buffers: Mapping[str, int] = field(default_factory=dict)
    arguments: Mapping[str, Mapping[Place, Heads]] = field(default_factory=dict)

    def apply(self, block: nn.Module, *, index: int, count: int, peers: Peers) -> None:
        """Let a block compute with the part number ``index`` of ``count`` of what is not cut itself."""
        part = _Part(index, count, peers)
        if self.buffers:
            part.read_buffers(block, self.buffers)
        for path, arguments in self.arguments.items():
            part.read_arguments(block.get_submodule(path), arguments)


def head_cuts(
    block: nn.Module,
    call: BlockCall,
    *,
    layers: Collection[str],
    rows: Collection[str],
    homes: Collection[str],
    heads: Collection[int],
    inner: Collection[int],
    count: int,
) -> Iterator[HeadCuts]:
    """Yield what may be cut with the heads, the likeliest first.

    Args:
        block: a block with real tensors.
        call: what it is called with.
        layers: all linear layers.
        rows: the layers that are fed by what is inside.
        homes: the modules that have the layers of a pair.
        heads: how many heads there are, as far as attributes of modules say so.
        inner: the numbers of features inside of pairs.
        count: the number of parts.
    """
    inside = _inside(block, call, layers, rows)
    wanted = [size for size in (*heads, *inner) if size % count == 0]

    def axis_of(tensor: Tensor, sizes: Sequence[int]) -> int | None:
        return next((tensor.shape.index(size) for size in sizes if size in tensor.shape), None)

    exact = {name: axis for name, p in inside.items() if (axis := axis_of(p, wanted)) is not None}
    known = [size for size in heads if size % count == 0 and size > 1]
    buffers = {n: axis for n, b in block.named_buffers() if (axis := axis_of(b, wanted)) is not None}
    arguments = _at_homes(block, call, homes, known)
    alone = HeadCuts(parameters=_cuts(exact))
    called = replace(alone, arguments=arguments)
    tried: list[HeadCuts] = [HeadCuts()]
    for cuts in (alone, called, replace(alone, buffers=buffers), replace(called, buffers=buffers)):
        if cuts not in tried:
            tried.append(cuts)
            yield cuts
    options = {
        name: [None, *(a for a, n in enumerate(p.shape) if n > 1 and n % count == 0 and any(i % n == 0 for i in inner))]
        for name, p in inside.items()
    }
    for axes in itertools.islice(itertools.product(*options.values()), MOST_COMBINATIONS):
        chosen = {name: axis for name, axis in zip(options, axes, strict=True) if axis is not None}
        if chosen and chosen != exact:
            yield HeadCuts(parameters=_cuts(chosen))


def _cuts(axes: Mapping[str, int]) -> dict[str, AxisCut]:
    return {name: AxisCut(over="tensor", axis=axis) for name, axis in axes.items()}


def _inside(
    block: nn.Module, call: BlockCall, layers: Collection[str], rows: Collection[str]
) -> dict[str, nn.Parameter]:
    """Return the parameters on which the inputs of rows depend, other than through linear layers."""
    given: list[Tensor] = []

    def cut(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        return map_leaves(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, out)

    def see(module: nn.Module, args: Any, kwargs: Any) -> None:
        given.extend(tensors_in((args, kwargs))[:1])

    handles = [block.get_submodule(name).register_forward_hook(cut, with_kwargs=True) for name in layers]
    handles += [block.get_submodule(name).register_forward_pre_hook(see, with_kwargs=True) for name in rows]
    try:
        call.run(block)
    finally:
        for handle in handles:
            handle.remove()
    of_layers = {id(p) for name in layers for p in block.get_submodule(name).parameters(recurse=False)}
    others = {n: p for n, p in block.named_parameters() if id(p) not in of_layers and p.requires_grad}
    loss = sum((tensor.sum() for tensor in given if tensor.requires_grad), torch.zeros(()))
    if not others or not loss.requires_grad:
        return {}
    found = torch.autograd.grad(loss, list(others.values()), allow_unused=True)
    return {name: p for (name, p), gradient in zip(others.items(), found, strict=True) if gradient is not None}


def _at_homes(
    block: nn.Module, call: BlockCall, homes: Collection[str], heads: Sequence[int]
) -> dict[str, dict[Place, Heads]]:
    """Return where heads are in what some modules are called with beside their first argument."""
    found: dict[str, dict[Place, Heads]] = {}

    def of(tensor: Tensor, rows: int) -> Heads | None:
        for count in heads:
            samples = int(tensor.ndim > 3 and len(tensor) == rows)  # their axis comes first
            if tensor.ndim > 2 and count in tensor.shape[samples:-1]:
                return Heads(samples + tensor.shape[samples:].index(count), count)
            if tensor.ndim == 3 and len(tensor) == rows * count:
                return Heads(None, count)
        return None

    def see(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            (first, *_), others = tensors_in((args, kwargs)), {**dict(enumerate(args[1:], 1)), **kwargs}
            tensors = {key: value for key, value in others.items() if isinstance(value, Tensor)}
            places = {
                key: place
                for key, value in tensors.items()
                if value.shape != first.shape and (place := of(value, len(first))) is not None  # no other hidden state
            }
            if places:
                found[name] = places

        return hook

    handles = [block.get_submodule(name).register_forward_pre_hook(see(name), with_kwargs=True) for name in homes]
    try:
        call.run(block)
    finally:
        for handle in handles:
            handle.remove()
    return found


@dataclass(frozen=True)
class _Part:
    index: int
    count: int
    peers: Peers

    def of(self, whole: Tensor, axis: int) -> Tensor:
        size = whole.shape[axis] // self.count
        return whole.narrow(axis, self.index * size, size)

    def read_buffers(self, block: nn.Module, axes: Mapping[str, int]) -> None:
        for name, axis in axes.items():
            path, _, attribute = name.rpartition(".")
            # A stage may call a module without its block.
            parts = ["", *itertools.accumulate(path.split("."), lambda one, other: f"{one}.{other}")] if path else [""]
            self._read_buffer([block.get_submodule(part) for part in parts], attribute, axis)

    def _read_buffer(self, callers: Sequence[nn.Module], attribute: str, axis: int) -> None:
        """Let a buffer of the last of some modules be a part of it while one of them is called."""
        called: list[nn.Module] = []
        kept: list[Tensor] = []

        def begin(module: nn.Module, args: Any) -> None:
            if not called:
                own = own_buffers(callers[-1])
                whole = own[attribute]
                assert whole is not None
                kept.append(whole)
                own[attribute] = self.of(whole, axis)
            called.append(module)

        def end(module: nn.Module, args: Any, out: Any) -> None:
            if called and called[-1] is module:
                called.pop()
                if not called:
                    own_buffers(callers[-1])[attribute] = kept.pop()

        for module in callers:
            module.register_forward_pre_hook(begin)
            module.register_forward_hook(end, always_call=True)

    def read_arguments(self, module: nn.Module, places: Mapping[Place, Heads]) -> None:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
            def part(key: Place, value: Any) -> Any:
                if key not in places or not isinstance(value, Tensor) or not places[key].are_in(value):
                    return value
                entered = _Entered.apply(value, self.peers) if value.requires_grad else value
                return places[key].part(entered, self.index, self.count)

            return tuple(part(n, a) for n, a in enumerate(args)), {n: part(n, a) for n, a in kwargs.items()}

        module.register_forward_pre_hook(begin, with_kwargs=True)


class _Entered(torch.autograd.Function):
    """The same on all ranks, of whose gradient each has a part."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.sum(gradient), None
