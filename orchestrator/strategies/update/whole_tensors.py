"""Updates by an optimizer that needs whole tensors, such as Muon, on ranks that have shards of them.

A few tensors at a time, the parameter, its gradient and the state of its shape are gathered, and each rank lets the
optimizer of the job update them alone. Of the result it keeps its shards, and all of what has another shape, which is
equal on all ranks.

The update is computed first, with the other ranks, and made afterwards, without them. So a rank that is interrupted has
either the whole update or nothing of it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.compat.process_groups import all_gather_single
from orchestrator.compat.torch import adopt_user_state, copy_all, count_step, pytree
from orchestrator.planning.placement import Box
from orchestrator.state.optimizers import Shard
from orchestrator.strategies.update.gradients import buckets


@dataclass(frozen=True, kw_only=True)
class ShardMap:
    """How parameters are divided over the ranks of a ``group``.

    Attributes:
        boxes: those of all ranks of the group, in their order, of each parameter that is divided.
        index: the number of this rank in the group.
        group: the ranks; None if this one has everything.
    """

    boxes: Mapping[Tensor, Sequence[Box]] = field(default_factory=dict)
    index: int = 0
    group: dist.ProcessGroup | None = None

    def shape(self, parameter: Tensor) -> torch.Size:
        """Return the shape of the whole parameter."""
        return torch.Size(self.boxes[parameter][0].full) if parameter in self.boxes else parameter.shape

    def own(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor that has the shape of the whole ``parameter``."""
        if parameter not in self.boxes:
            return whole
        return whole[self.boxes[parameter][self.index].slices_in(Box.whole(whole.shape))].clone()

    def gathered(self, shards: Sequence[tuple[Tensor, Tensor]]) -> Sequence[Tensor]:
        """Return copies, whole, of tensors that are divided as the parameter beside each of them. Collective."""
        plain = [shard.detach().as_subclass(Tensor) for _, shard in shards]
        if self.group is None:
            return [tensor.clone() for tensor in plain]
        found = []
        by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
        for number, ((parameter, _), shard) in enumerate(zip(shards, plain, strict=True)):
            divided = parameter in self.boxes
            found.append(shard.new_empty(self.shape(parameter)) if divided else shard.clone())
            if divided:
                by_dtype[shard.dtype].append(number)
        for numbers in by_dtype.values():
            boxes = [[self.boxes[shards[n][0]][rank] for n in numbers] for rank in range(self.group.size())]
            for of_rank, values in zip(
                boxes, pieces_of_all([plain[n] for n in numbers], boxes, self.group), strict=True
            ):
                for number, box, value in zip(numbers, of_rank, values, strict=True):
                    found[number][box.slices_in(Box.whole(box.full))] = value
        return found


@dataclass(frozen=True, kw_only=True)
class WholeUpdate:
    """An update that has been computed, and not made.

    Attributes:
        weights: the new values of the parameters, or of this rank's shards of them.
        state: the new state of each parameter, and of the whole optimizer.
        options: the new options of each parameter group.
        attributes: what has changed of the optimizer beside these.
    """

    weights: Mapping[Tensor, Tensor]
    state: Mapping[Any, Any]
    options: Sequence[Mapping[str, Any]]
    attributes: Mapping[str, Any]

    @torch.no_grad()
    def make(self, optimizer: Optimizer) -> None:
        """Change the parameters and the state of the ``optimizer`` that has computed it."""
        copy_all([*self.weights.values()], to=[parameter.detach() for parameter in self.weights])
        for key, state in self.state.items():
            if state:
                optimizer.state[key] = state
            else:
                optimizer.state.pop(key, None)
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            group.update(options)
        vars(optimizer).update(self.attributes)
        count_step(optimizer)


@torch.no_grad()
def computed(optimizer: Optimizer, shard_map: ShardMap, *, together: bool = True) -> WholeUpdate:
    """Return the update that ``optimizer`` makes of whole tensors. Collective.

    Args:
        optimizer: its parameters are this rank's shards, with their gradients. It stays as it is.
        shard_map: how they are divided.
        together: whether a call of the optimizer has several small parameters, and not one alone.
    """
    places = [(group, number) for group in optimizer.param_groups for number in range(len(group["params"]))]
    parameters = [group["params"][number] for group, number in places]
    wholes = [torch.empty(shard_map.shape(p), dtype=p.dtype, device="meta") for p in parameters]
    sizes = [len(bucket) for bucket in buckets(wholes)] if together else [1] * len(parameters)
    ahead = iter(places)
    of_all = {key: values for key, values in optimizer.state.items() if not isinstance(key, Tensor)}
    weights: dict[Tensor, Tensor] = {}
    state: dict[Any, Any] = {}
    for size in sizes or [0]:  # without parameters, options may still change
        alone, own = _stepped(optimizer, [*itertools.islice(ahead, size)], shard_map, copy.deepcopy(of_all))
        weights |= {parameter: shard_map.own(parameter, whole.detach()) for parameter, whole in own.items()}
        state |= {p: _kept(alone.state.get(w), p, shard_map) for p, w in own.items()}
    state |= {key: values for key, values in alone.state.items() if not isinstance(key, Tensor)}
    options = [{key: value for key, value in group.items() if key not in _NAMED} for group in alone.param_groups]
    before = vars(optimizer)
    changed = {k: v for k, v in vars(alone).items() if k not in ("state", "param_groups") and v is not before.get(k)}
    return WholeUpdate(weights=weights, state=state, options=options, attributes=changed)


def pieces_of_all(
    shards: Sequence[Tensor], boxes: Sequence[Sequence[Box]], group: dist.ProcessGroup
) -> Sequence[Sequence[Tensor]]:
    """Return the shards that each rank of ``group`` has of some tensors, by rank. One collective operation.

    Args:
        shards: those of this rank, of one dtype.
        boxes: by rank, those of all shards.
    """
    sizes = [[math.prod(box.shape) for box in of_rank] for of_rank in boxes]
    most = max(map(sum, sizes))
    packed = torch.cat([shard.reshape(-1) for shard in shards])
    packed = nn.functional.pad(packed, (0, most - packed.numel()))
    everyone = packed.new_empty(len(sizes), most)
    # As bytes, because not every backend supports every dtype.
    all_gather_single(everyone.view(torch.uint8).view(-1), packed.view(torch.uint8), group)
    return [
        [value.view(box.shape) for value, box in zip(row[: sum(own)].split(own), of_rank, strict=True)]
        for row, own, of_rank in zip(everyone, sizes, boxes, strict=True)
    ]


_NAMED = ("params", "param_names")


def _stepped(
    optimizer: Optimizer, places: Sequence[tuple[dict[str, Any], int]], shard_map: ShardMap, of_all: Mapping[Any, Any]
) -> tuple[Optimizer, Mapping[nn.Parameter, nn.Parameter]]:
    """Return a copy of ``optimizer`` that has updated some parameters alone, and these parameters, whole.

    Args:
        places: the parameter group and the number in it, of each of these parameters.
        shard_map: how they are divided.
        of_all: the state of the whole optimizer, for the copy.
    """
    parameters: list[nn.Parameter] = [group["params"][number] for group, number in places]
    states = {p: pytree.tree_flatten_with_path(optimizer.state[p]) for p in parameters if p in optimizer.state}
    # By their paths, because a state that has been loaded may have another order.
    by_path = {p: sorted(found, key=lambda entry: pytree.keystr(entry[0])) for p, (found, _) in states.items()}
    shards = [(p, leaf) for p, found in by_path.items() for _, leaf in found if isinstance(leaf, Shard)]
    gradients = [(p, p.grad) for p in parameters if p.grad is not None]
    values = iter(shard_map.gathered([*((p, p) for p in parameters), *gradients, *shards]))
    own = {p: nn.Parameter(next(values), requires_grad=p.requires_grad) for p in parameters}
    for parameter, whole in own.items():
        adopt_user_state(whole, parameter)
    for parameter, _ in gradients:
        own[parameter].grad = next(values)
    whole_of = {id(shard): next(values) for _, shard in shards}

    def ready(leaf: Any) -> Any:
        if isinstance(leaf, Shard):
            return whole_of[id(leaf)]
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    alone: Optimizer = object.__new__(type(optimizer))
    vars(alone).update({key: value for key, value in vars(optimizer).items() if key != "step"})  # a schedule's
    alone.state = defaultdict(dict, of_all)
    for parameter, (leaves, structure) in states.items():
        alone.state[own[parameter]] = pytree.tree_unflatten([ready(leaf) for _, leaf in leaves], structure)
    copies = {id(group): {**group, **{key: [] for key in _NAMED if key in group}} for group in optimizer.param_groups}
    for (group, number), parameter in zip(places, parameters, strict=True):
        copies[id(group)]["params"].append(own[parameter])
        if names := group.get("param_names"):
            copies[id(group)]["param_names"].append(names[number])
    alone.param_groups = [*copies.values()]
    with torch.enable_grad():
        alone.step()
    return alone, own


def _kept(state: Any, parameter: Tensor, shard_map: ShardMap) -> Any:
    """Return what this rank keeps of the ``state`` of a whole parameter."""

    def kept(leaf: Any) -> Any:
        divided = parameter in shard_map.boxes and isinstance(leaf, Tensor) and leaf.shape == shard_map.shape(parameter)
        return shard_map.own(parameter, leaf.detach()).as_subclass(Shard) if divided else leaf

    return pytree.tree_map(kept, state)
