"""The elements that a rank updates: all that it has, or its shard of each parameter.

Of shards, the ranks exchange what they have updated. With ``strategy.shard_optimizer``, the shards are the state of a
rank. What has been exchanged is a copy of them, which a recovery makes again.
Rajbhandari et al., SC 2020, "ZeRO", stage 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.compat.torch import copy_all
from orchestrator.model.stages.own_stages import module_of
from orchestrator.planning.mesh import DENSE
from orchestrator.planning.placement import AxisCut, Box, Placement, Shape, is_divisible
from orchestrator.strategies.update.gradients import buckets
from orchestrator.strategies.update.whole_tensors import pieces_of_all

PLACES = 64
"""A dimension with so many places for each rank is divided evenly enough."""


class Own:
    """All that this rank has, which it updates itself.

    Attributes:
        placements: where the parameters are, by each of their names.
    """

    group: dist.ProcessGroup | None = None
    """The ranks that have all shards together; None between two generations."""

    def __init__(self, model: Callable[[], nn.Module], placements: Mapping[str, Placement]):
        """``model`` returns a module with the parameters, which remain; a layer may replace its buffers."""
        self._model = model
        self.placements = placements

    def module(self) -> nn.Module:
        """Return a module with what this rank updates, and the buffers that are saved, under the model's own names."""
        return self._model()

    def whole_of(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """Return the whole parameters of some of the shards."""
        return parameters

    def take_gradients(self) -> None:
        """Give the shards their gradients, which the whole parameters lose, and values that forward() has changed."""

    def take_frozen(self) -> None:
        """Give the shards that are not updated the values of the whole parameters, which forward() may have changed."""

    def exchange(self, *, trained: bool = False) -> None:
        """Give whole parameters the values of the shards of all ranks. Collective.

        ``trained``: only those that are updated.
        """


class Shards(Own):
    """This rank's shard of each parameter of a model, or of stages, that it has whole.

    A shard is a view of its parameter where its memory is contiguous, and a copy otherwise. Parameters without a
    dimension or an element are in the shards of all ranks, which make equal updates of them.

    Attributes:
        shards: by the first name of the parameter.
        placements: where the parameters are, by each of their names.
        whole: the parameters, by their first names.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        cuts: Mapping[str, AxisCut],
        *,
        index: int,
        count: int,
        placed: Callable[[str, Shape], Placement],
        on_stages: Callable[[Mapping[str, Placement]], Mapping[str, Placement]],
    ):
        """Divide parameters over ``count`` ranks, of which this one is number ``index``.

        Args:
            model: as of :class:`Own`.
            cuts: those of :func:`cuts_of`.
            index: the place of this rank among those that divide the state.
            count: their number.
            placed: returns where a parameter is, given its name and shape here, before it is divided.
            on_stages: returns placements with the stages that have the parameters.
        """
        self._index = index
        self._count = count
        self.whole = dict(model().named_parameters())
        self._cuts = {name: cuts[name] for name in self.whole if name in cuts}
        self.shards = {name: self._shard(name, parameter) for name, parameter in self.whole.items()}
        named = dict(model().named_parameters(remove_duplicate=False))
        first = {parameter: name for name, parameter in self.whole.items()}
        self._first = {name: first[parameter] for name, parameter in named.items()}
        outer = {name: placed(name, tuple(self.whole[of].shape)) for name, of in self._first.items()}
        placements = {
            name: replace(outer[name], cuts=(*outer[name].cuts, self._cuts[of])) if of in self._cuts else outer[name]
            for name, of in self._first.items()
        }
        super().__init__(model, on_stages(placements))

    def module(self) -> nn.Module:
        tensors = self._model().state_dict(keep_vars=True)
        return module_of({n: self.shards[self._first[n]] if n in self._first else t for n, t in tensors.items()})

    def whole_of(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        chosen = {*parameters}
        return [self.whole[name] for name, shard in self.shards.items() if shard in chosen]

    def take_gradients(self) -> None:
        self._take(trained=True)
        for name in self._cuts:
            whole = self.whole[name]
            if whole.grad is not None:
                self.shards[name].grad = self._own(name, whole.grad).contiguous()
                whole.grad = None

    def take_frozen(self) -> None:
        self._take(trained=False)

    @torch.no_grad()
    def exchange(self, *, trained: bool = False) -> None:
        chosen = [name for name in self.shards if self.shards[name].requires_grad] if trained else self._cuts
        chosen = [name for name in chosen if name in self._cuts]
        ahead = iter(chosen)
        for bucket in buckets([self.whole[name] for name in chosen]):
            self._exchange([*itertools.islice(ahead, len(bucket))])

    @torch.no_grad()
    def _take(self, *, trained: bool) -> None:
        for name, shard in self.shards.items():
            if name in self._cuts and shard.requires_grad == trained:
                own = self._own(name, self.whole[name])
                if own.data_ptr() != shard.data_ptr():
                    shard.copy_(own)

    def _exchange(self, names: Sequence[str]) -> None:
        """Exchange parameters of one dtype in one operation, for which the shards of all ranks have one size."""
        assert self.group is not None
        boxes = [[self._box(name, rank) for name in names] for rank in range(self._count)]
        own = [self.shards[name] for name in names]
        pieces = [*pieces_of_all(own, boxes, self.group)]
        pieces[self._index] = own  # which do not come back from others: an operation that is aborted leaves garbage
        for of_rank, values in zip(boxes, pieces, strict=True):
            places = [self.whole[n][box.slices_in(Box.whole(box.full))] for n, box in zip(names, of_rank, strict=True)]
            copy_all(values, to=places)

    def _shard(self, name: str, whole: nn.Parameter) -> nn.Parameter:
        if name not in self._cuts:
            return whole
        return nn.Parameter(self._own(name, whole.detach()).contiguous(), requires_grad=whole.requires_grad)

    def _own(self, name: str, whole: Tensor) -> Tensor:
        return whole[self._box(name, self._index).slices_in(Box.whole(whole.shape))]

    def _box(self, name: str, index: int) -> Box:
        return self._cuts[name].box(tuple(self.whole[name].shape), index=index, count=self._count)


def cuts_of(model: nn.Module, count: int) -> Mapping[str, AxisCut]:
    """Return how the parameters of a model, by each of their names, are divided over ``count`` ranks."""
    named = dict(model.named_parameters(remove_duplicate=False))
    first = {parameter: name for name, parameter in model.named_parameters()}
    cuts: dict[str, AxisCut] = {}
    for trained in (True, False):  # so that what the trained ones take is divided evenly
        cuts |= cut_evenly({n: tuple(p.shape) for p, n in first.items() if p.requires_grad == trained}, count)
    return {name: cuts[first[parameter]] for name, parameter in named.items() if first[parameter] in cuts}


def cut_evenly(shapes: Mapping[str, Shape], count: int) -> dict[str, AxisCut]:
    """Divide those tensors over ``count`` ranks along :data:`DENSE` that can be.

    The numbers of elements that the ranks have of all tensors differ at most by those of one place of a tensor.
    """
    held = [0] * count
    cuts: dict[str, AxisCut] = {}
    for name, shape in shapes.items():
        if not is_divisible(shape):
            continue
        longest = max(range(len(shape)), key=shape.__getitem__)
        axis = next((a for a, places in enumerate(shape) if places >= PLACES * count), longest)
        least, rest = divmod(shape[axis], count)
        more = sorted(range(count), key=held.__getitem__)[:rest]
        sizes = tuple(least + (rank in more) for rank in range(count))
        cuts[name] = AxisCut(over=DENSE, axis=axis, sizes=sizes)
        place = math.prod(shape) // max(1, shape[axis])
        held = [had + size * place for had, size in zip(held, sizes, strict=True)]
    return cuts
