"""Parts of the parameters of a replica: each rank updates its own, and the ranks exchange what they have updated.

Rajbhandari et al., SC 2020, "ZeRO", stage 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from orchestrator.compat.process_groups import all_gather_single
from orchestrator.compat.torch import copy_all
from orchestrator.config.schema import Config
from orchestrator.config.text import first_few
from orchestrator.job import Job
from orchestrator.model.partial_init import build_fake
from orchestrator.model.precision import Precision
from orchestrator.model.stages import module_of
from orchestrator.planning.plan import Plan
from orchestrator.state.boxes import Box, Shape, is_divisible
from orchestrator.strategies.constructor import constructor_of
from orchestrator.strategies.update.elementwise import elementwise_errors
from orchestrator.strategies.update.fused_updates import sparse_parameters
from orchestrator.strategies.update.gradients import buckets

PLACES = 64
"""A dimension with so many places for each rank is divided evenly enough."""


class OptimizerShards:
    """This rank's part of each parameter of a whole model.

    A part is a view of its parameter where its memory is contiguous, and a copy otherwise. Parameters without a
    dimension or an element are in the parts of all ranks, which make equal updates of them.

    Attributes:
        parts: by the first name of the parameter.
        boxes: where the parts are, by each name of a parameter.
        saved_names: the names of all tensors of a checkpoint.
    """

    def __init__(self, model: nn.Module, *, index: int, count: int):
        """Divide the parameters of ``model`` over ``count`` ranks, of which this one is number ``index``."""
        self._model = model
        self._index = index
        self._whole = dict(model.named_parameters())
        self._cuts: dict[str, Sequence[Box]] = {}
        for trained in (True, False):  # so that what the trained ones take is divided evenly
            shapes = {name: tuple(p.shape) for name, p in self._whole.items() if p.requires_grad == trained}
            self._cuts |= cut_evenly(shapes, count)
        self.parts = {name: self._part(name, parameter) for name, parameter in self._whole.items()}
        named = dict(model.named_parameters(remove_duplicate=False))
        first = {parameter: name for name, parameter in self._whole.items()}
        self._first = {name: first[parameter] for name, parameter in named.items()}
        self.boxes = {name: self._cuts[of][index] for name, of in self._first.items() if of in self._cuts}
        self.saved_names = tuple(model.state_dict())

    def module(self) -> nn.Module:
        """Return a bare module with the parts, and the buffers that are saved, under the model's own names."""
        return module_of(
            {
                name: self.parts[self._first[name]] if name in self._first else self._model.get_buffer(name)
                for name in self.saved_names
            }
        )

    @torch.no_grad()
    def take(self) -> None:
        """Give the parts the values of the whole parameters."""
        for name in self._cuts:
            self.parts[name].copy_(self._own(name, self._whole[name]))

    def take_gradients(self) -> None:
        """Give the parts their gradients, which the whole parameters lose."""
        for name in self._cuts:
            whole = self._whole[name]
            if whole.grad is not None:
                self.parts[name].grad = self._own(name, whole.grad).contiguous()
                whole.grad = None

    @torch.no_grad()
    def exchange(self, names: Iterable[str] | None = None) -> None:
        """Give the whole parameters the values of the parts of all ranks. A collective operation.

        ``names``: the first names of the parameters; None for all.
        """
        chosen = [name for name in (self._cuts if names is None else names) if name in self._cuts]
        ahead = iter(chosen)
        for bucket in buckets([self._whole[name] for name in chosen]):
            self._exchange([*itertools.islice(ahead, len(bucket))])

    @property
    def trained(self) -> Sequence[str]:
        """The first names of the parameters that are updated."""
        return [name for name, part in self.parts.items() if part.requires_grad]

    def _exchange(self, names: Sequence[str]) -> None:
        """Exchange parameters of one dtype in one operation, for which the parts of all ranks have one size."""
        sizes = [
            [math.prod(box.shape) for box in of_rank] for of_rank in zip(*(self._cuts[n] for n in names), strict=True)
        ]
        most = max(map(sum, sizes))
        packed = torch.cat([self.parts[name].reshape(-1) for name in names])
        packed = nn.functional.pad(packed, (0, most - packed.numel()))
        everyone = packed.new_empty(len(sizes), most)
        # As bytes, because not every backend supports every dtype.
        all_gather_single(everyone.view(torch.uint8).view(-1), packed.view(torch.uint8))
        values, places = [], []
        for rank, (row, own) in enumerate(zip(everyone, sizes, strict=True)):
            for name, value in zip(names, row[: sum(own)].split(own), strict=True):
                box = self._cuts[name][rank]
                # Own values do not come back from others: those of an operation that is aborted are garbage.
                values.append(self.parts[name] if rank == self._index else value.view(box.shape))
                places.append(self._whole[name][box.slices_in(Box.whole(box.full))])
        copy_all(values, to=places)

    def _part(self, name: str, whole: nn.Parameter) -> nn.Parameter:
        if name not in self._cuts:
            return whole
        return nn.Parameter(self._own(name, whole.detach()).contiguous(), requires_grad=whole.requires_grad)

    def _own(self, name: str, whole: Tensor) -> Tensor:
        return whole[self._cuts[name][self._index].slices_in(Box.whole(whole.shape))]


def check_optimizer_shards(config: Config, job: Job, plan: Plan, errors: list[str]) -> tuple[str, ...]:
    """Check that the optimizer's state can be divided as planned, with fake tensors.

    Args:
        config: the configuration.
        job: the job whose model is trained.
        plan: the plan of the run.
        errors: receives a line for each reason why the state cannot be divided.

    Returns:
        Notes for the user, printed with the plan.
    """
    key, cpu = "strategy.shard_optimizer=true", torch.device("cpu")
    model = build_fake(constructor_of(job, config.train, Precision.named(config.train.precision, "cpu")), cpu).model
    sparse = {*sparse_parameters([model])}
    if tables := [name for name, parameter in model.named_parameters() if parameter in sparse]:
        errors.append(
            f"{key}: {first_few(tables, 2)} have sparse gradients, which cannot be divided; give the embedding "
            "sparse=False, or set it to false"
        )
    errors += elementwise_errors(key, job, model, otherwise="set it to false")
    if errors:
        return ()
    count = plan.mesh.shard
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    held = [sum(math.prod(cut[rank].shape) for cut in cut_evenly(shapes, count).values()) for rank in range(count)]
    return (
        f"{key}: each worker updates at most {max(held):,} of {sum(held):,} elements of parameters, and keeps the "
        "optimizer's state of these",
    )


def cut_evenly(shapes: Mapping[str, Shape], count: int) -> dict[str, Sequence[Box]]:
    """Divide those tensors over ``count`` ranks that can be; the boxes of each are in the order of the ranks.

    The numbers of elements that the ranks have of all tensors differ at most by those of one place of a tensor.
    """
    held = [0] * count
    cuts: dict[str, Sequence[Box]] = {}
    for name, shape in shapes.items():
        if not is_divisible(shape):
            continue
        longest = max(range(len(shape)), key=shape.__getitem__)
        axis = next((a for a, places in enumerate(shape) if places >= PLACES * count), longest)
        least, rest = divmod(shape[axis], count)
        more = sorted(range(count), key=held.__getitem__)[:rest]
        places = [least + (rank in more) for rank in range(count)]
        starts = itertools.accumulate(places, initial=0)
        cuts[name] = [Box.cut(shape, axis=axis, start=s, size=p) for s, p in zip(starts, places, strict=False)]
        held = [had + math.prod(box.shape) for had, box in zip(held, cuts[name], strict=True)]
    return cuts
