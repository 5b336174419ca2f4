"""How values flow between the linear layers of a block: which can be divided together, and which outputs are packed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.torch import TorchDispatchMode, storage_key
from orchestrator.model.batch import tensors_in
from orchestrator.model.tensor.attention import has_divisible_heads
from orchestrator.model.tensor.block_calls import BlockCall
from orchestrator.model.tensor.region import Packed, Pair, is_linear
from orchestrator.model.tensor.token_shards import with_first

_OUTPUT = ""
"""The name of what a block returns."""


def candidates(block: nn.Module, call: BlockCall) -> list[Pair]:
    """Return the pairs whose columns feed their rows and nothing else, those with the largest columns first.

    No layer is in two of them. A pair has several rows if the layer that its columns feed has an adapter.

    Args:
        block: a block with real tensors.
        call: what it is called with.
    """
    linear = {name: module for name, module in block.named_modules() if is_linear(module)}
    columns: dict[frozenset[str], list[str]] = {}
    for name, fed in _flow(block, call, linear).items():
        if fed and _OUTPUT not in fed:
            columns.setdefault(frozenset(fed), []).append(name)
    pairs = [
        Pair(columns=tuple(names), rows=tuple(name for name in linear if name in fed)) for fed, names in columns.items()
    ]
    pairs.sort(key=lambda pair: -_size(pair, linear))
    names = (name for name, module in block.named_modules() if has_divisible_heads(module))
    return [*_disjoint(pairs), *(Pair(columns=(name,), rows=(f"{name}.out_proj",)) for name in names)]


def _flow(block: nn.Module, call: BlockCall, linear: Mapping[str, nn.Module]) -> dict[str, set[str]]:
    """Return which inputs of linear layers, and whether the output, depend directly on the output of each of them.

    Layers that are called several times are left out.
    """
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in linear}
    plain: set[str] = {*linear}

    def hook(name: str) -> Any:
        def cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
            def begin(made: Tensor) -> Tensor:
                calls[name].append((_first(args, kwargs), made.detach().requires_grad_()))
                return calls[name][-1][1].clone()  # which the block may change in place

            if not isinstance(out, Tensor):
                plain.discard(name)
            return with_first(out, begin)

        return cut

    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in linear.items()]
    try:
        out = call.run(block)
    finally:
        for handle in handles:
            handle.remove()
    once = {name: found[0] for name, found in calls.items() if len(found) == 1}
    every = [entry for found in calls.values() for entry in found]
    targets = [*((name, given) for name, found in calls.items() for given, _ in found)]
    targets = [(name if name in plain else _OUTPUT, given) for name, given in targets]  # a row returns its sums alone
    targets += [(_OUTPUT, tensor) for tensor in tensors_in(out) if tensor.is_floating_point()][:1]
    feeds: dict[str, set[str]] = {name: set() for name in once}
    several = {name for name, found in calls.items() if len(found) > 1}
    leaves = {id(made): name for name, (_, made) in once.items()}
    for target, tensor in targets:
        if not every or not tensor.requires_grad:
            continue
        weights = torch.linspace(0.5, 1.5, tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        made = [made for _, made in every]
        gradients = torch.autograd.grad((tensor * weights).sum(), made, allow_unused=True, retain_graph=True)
        for leaf, gradient in zip(made, gradients, strict=True):
            if gradient is not None and id(leaf) in leaves:
                feeds[leaves[id(leaf)]].add(_OUTPUT if target in several else target)
    return feeds


def _size(pair: Pair, linear: Mapping[str, nn.Module]) -> int:
    return sum(linear[name].get_parameter("weight").numel() for name in pair.columns)


def _disjoint(pairs: Iterable[Pair]) -> list[Pair]:
    taken: set[str] = set()
    chosen = []
    for pair in pairs:
        if not taken & {*pair.layers}:
            taken |= {*pair.layers}
            chosen.append(pair)
    return chosen


@torch.no_grad()
def packed_outputs(block: nn.Module, call: BlockCall) -> Packed:
    """Return the sizes of the parts of packed outputs of linear layers.

    Queries, keys and values of one projection, or the gate of an MLP beside what it gates, are views of its output,
    each of some of its places. A rank needs a part of each of them.

    Args:
        block: a block with real tensors.
        call: what it is called with.
    """
    watch = _Views()
    layers = {name: module for name, module in block.named_modules() if is_linear(module)}
    outputs: dict[str, Tensor] = {}

    def see_first(name: str, out: Tensor) -> None:
        outputs.setdefault(name, watch.begin(out))

    def see(name: str) -> Any:
        return lambda module, args, out: see_first(name, tensors_in(out)[0])

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


def _first(args: Any, kwargs: Any) -> Tensor:
    return next(tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point())


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
