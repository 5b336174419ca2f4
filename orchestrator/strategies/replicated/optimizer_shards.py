"""Shards of the parameters of a replica: each rank updates its own, and the ranks exchange what they have updated.

With ``strategy.shard_optimizer``, the shards are the state of a rank. What has been exchanged is a copy of them, which
a recovery makes again.
Rajbhandari et al., SC 2020, "ZeRO", stage 1.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.compat.torch import copy_all
from orchestrator.config.text import first_few
from orchestrator.model.stages import module_of
from orchestrator.planning.mesh import DENSE
from orchestrator.planning.placement import AxisCut, Box, Placement, Shape, is_divisible
from orchestrator.planning.plan import Plan
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.measure.device import TensorSize, sizes_of
from orchestrator.strategies.part_trainer import PartTrainer
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.update.gradients import buckets
from orchestrator.strategies.update.job_optimizer import optimizer_of_part, sparse_parameters
from orchestrator.strategies.update.whole_tensors import pieces_of_all

PLACES = 64
"""A dimension with so many places for each rank is divided evenly enough."""


class OptimizerShards:
    """This rank's shard of each parameter of a model, or of stages, that it has whole.

    A shard is a view of its parameter where its memory is contiguous, and a copy otherwise. Parameters without a
    dimension or an element are in the shards of all ranks, which make equal updates of them.

    Attributes:
        shards: by the first name of the parameter.
        placements: where the parameters are, by each of their names.
        whole: the parameters, by their first names.
        group: the ranks that have all shards together; None between two generations.
    """

    group: dist.ProcessGroup | None = None

    def __init__(
        self,
        model: Callable[[], nn.Module],
        cuts: Mapping[str, AxisCut],
        *,
        index: int,
        count: int,
        placed: Callable[[str, Shape], Placement],
    ):
        """Divide parameters over ``count`` ranks, of which this one is number ``index``.

        Args:
            model: returns the model. Its parameters remain; a layer may replace its buffers.
            cuts: those of :func:`cuts_of`.
            index: the place of this rank among those that divide the state.
            count: their number.
            placed: returns where a parameter is, given its name and shape here, before it is divided.
        """
        self._model = model
        self._index = index
        self._count = count
        self.whole = dict(model().named_parameters())
        self._cuts = {name: cuts[name] for name in self.whole if name in cuts}
        self.shards = {name: self._shard(name, parameter) for name, parameter in self.whole.items()}
        named = dict(model().named_parameters(remove_duplicate=False))
        first = {parameter: name for name, parameter in self.whole.items()}
        self._first = {name: first[parameter] for name, parameter in named.items()}
        outer = {name: placed(name, tuple(self.whole[of].shape)) for name, of in self._first.items()}
        self.placements = {
            name: replace(outer[name], cuts=(*outer[name].cuts, self._cuts[of])) if of in self._cuts else outer[name]
            for name, of in self._first.items()
        }

    def module(self) -> nn.Module:
        """Return a bare module with the shards, and the buffers that are saved, under the model's own names."""
        tensors = self._model().state_dict(keep_vars=True)
        return module_of({n: self.shards[self._first[n]] if n in self._first else t for n, t in tensors.items()})

    @torch.no_grad()
    def take(self, names: Iterable[str] | None = None) -> None:
        """Give the shards the values of the whole parameters.

        ``names``: the first names of the parameters; None for all.
        """
        for name in self._chosen(names):
            own, shard = self._own(name, self.whole[name]), self.shards[name]
            if own.data_ptr() != shard.data_ptr():
                shard.copy_(own)

    def take_gradients(self) -> None:
        """Give the shards their gradients, which the whole parameters lose, and values that forward() has changed."""
        self.take(self.trained)
        for name in self._cuts:
            whole = self.whole[name]
            if whole.grad is not None:
                self.shards[name].grad = self._own(name, whole.grad).contiguous()
                whole.grad = None

    @torch.no_grad()
    def exchange(self, names: Iterable[str] | None = None) -> None:
        """Give the whole parameters the values of the shards of all ranks. A collective operation.

        ``names``: the first names of the parameters; None for all.
        """
        chosen = self._chosen(names)
        ahead = iter(chosen)
        for bucket in buckets([self.whole[name] for name in chosen]):
            self._exchange([*itertools.islice(ahead, len(bucket))])

    @property
    def trained(self) -> Sequence[str]:
        """The first names of the parameters that are updated."""
        return [name for name, shard in self.shards.items() if shard.requires_grad]

    @property
    def frozen(self) -> Sequence[str]:
        """The first names of the others."""
        return [name for name, shard in self.shards.items() if not shard.requires_grad]

    def _chosen(self, names: Iterable[str] | None) -> Sequence[str]:
        return [name for name in (self._cuts if names is None else names) if name in self._cuts]

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


def check_optimizer_shards(outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
    """Check that the optimizer's state can be divided as planned, with fake tensors.

    Args:
        outline: the job and its model.
        plan: the plan of the run.
        errors: receives a line for each reason why the state cannot be divided.

    Returns:
        Notes for the user, printed with the plan.
    """
    key, model = "strategy.shard_optimizer=true", outline.whole.model
    sparse = {*sparse_parameters([model])}
    if tables := [name for name, parameter in model.named_parameters() if parameter in sparse]:
        errors.append(
            f"{key}: {first_few(tables, 2)} have sparse gradients, which cannot be divided; give the embedding "
            "sparse=False, or set it to false"
        )
    if errors:
        return ()
    count = plan.mesh.num_shards
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    cuts = cut_evenly(shapes, count)
    held = [
        sum(math.prod(cut.box(shapes[name], index=rank, count=count).shape) for name, cut in cuts.items())
        for rank in range(count)
    ]
    return (
        f"{key}: each worker updates at most {max(held):,} of {sum(held):,} elements of parameters, and keeps the "
        "optimizer's state of these",
    )


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


class OptimizerSharding(PartTrainer):
    """What a strategy with whole parameters on each rank does in addition."""

    shards: OptimizerShards

    def trained_part_of(
        self,
        modules: Sequence[nn.Module],
        whole: nn.Module,
        cuts: Mapping[str, AxisCut],
        train_set: Dataset[Any],
    ) -> Trained:
        """Return what this rank trains of its part.

        Args:
            modules: what it calls.
            whole: the whole model, maybe without memory.
            cuts: how its parameters are divided.
            train_set: the samples.
        """
        index, count = self.context.mesh.place(DENSE, self.context.global_rank)
        self.shards = OptimizerShards(self.undivided, cuts, index=index, count=count, placed=self.placement)
        trained = Trained(
            self.job,
            self.context,
            modules,
            {"": optimizer_of_part(self.job, whole, self.shards.module())},
            train_set,
            module=self.shards.module,
            placements=self.placed(self.shards.placements),
        )
        moving = {*trained.moving}
        trained.moving = [self.shards.whole[name] for name, shard in self.shards.shards.items() if shard in moving]
        return trained

    def share_parameters(self) -> None:
        self.shards.exchange()

    def sync_initial_state(self) -> None:
        super().sync_initial_state()
        self.shards.exchange()

    def apply(self) -> None:
        self.shards.take(self.shards.frozen)  # which forward passes may have changed
        super().apply()

    def end_step(self, norm: Tensor | None) -> bool:
        admitted = super().end_step(norm)
        if admitted:
            self._ahead = 1  # if the exchange fails, the step is not counted, but this rank's part has been updated
            self.shards.exchange(self.shards.trained)
            self._ahead = 0
        return admitted

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        with super().averaged_weights():
            self.shards.exchange(self.shards.trained)
            yield
        self.shards.exchange(self.shards.trained)

    def restore_part(self, state: TrainState) -> dict[str, Any]:
        meta = super().restore_part(state)
        self.shards.exchange()
        return meta

    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        meta = super().recover_state(sources, source_step=source_step, step=step, samples_consumed=samples_consumed)
        self._ahead = source_step - step  # if the exchange fails, the step is not counted
        self.shards.exchange()
        self._ahead = 0
        return meta

    def tensor_sizes(self) -> Iterable[TensorSize]:
        of_parts = [size for size in super().tensor_sizes() if size.kind == "optimizer state"]
        whole = sizes_of(self.undivided(), self.trained.optimizer)
        return [*of_parts, *(s for s in whole if s not in of_parts)]

    def close(self) -> None:
        super().close()
        if hasattr(self, "shards"):  # otherwise setup() has failed, or nothing is built yet
            self.shards.group = None
