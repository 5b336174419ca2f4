"""The layers of a block that can be divided together, found from how values flow between its linear layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.model.batch import tensors_in
from orchestrator.model.tensor.region import Pair, is_linear
from orchestrator.model.tensor.sample import BlockCall

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
    return _disjoint(sorted(pairs, key=lambda pair: -_size(pair, linear)))


def _flow(block: nn.Module, call: BlockCall, linear: Mapping[str, nn.Module]) -> dict[str, set[str]]:
    """Return which inputs of linear layers, and whether the output, depend directly on the output of each of them.

    Layers that are called several times are left out.
    """
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in linear}

    def hook(name: str) -> Any:
        def cut(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            calls[name].append((args[0], out.detach().requires_grad_()))
            return calls[name][-1][1].clone()  # which the block may change in place

        return cut

    handles = [module.register_forward_hook(hook(name)) for name, module in linear.items()]
    try:
        out = call.run(block)
    finally:
        for handle in handles:
            handle.remove()
    once = {name: found[0] for name, found in calls.items() if len(found) == 1}
    every = [entry for found in calls.values() for entry in found]
    targets = [*((name, given) for name, found in calls.items() for given, _ in found)]
    targets += [(_OUTPUT, tensor) for tensor in tensors_in(out) if tensor.is_floating_point()]
    feeds: dict[str, set[str]] = {name: set() for name in once}
    several = {name for name, found in calls.items() if len(found) > 1}
    leaves = {id(made): name for name, (_, made) in once.items()}
    for target, tensor in targets:
        if not tensor.requires_grad:
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
