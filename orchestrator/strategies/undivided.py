"""The whole model on one rank, and what passes of it leave of the batches that the ranks of a run compute together.

The batch is divided as the ranks divide it: a loss or a layer that compares samples sees the same of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import kept_generators, seed_generators
from orchestrator.compat.torch import FakeTensor
from orchestrator.job import Job
from orchestrator.model.batch import join, map_tensors, rows_between, tensors_in
from orchestrator.model.partial_init import build_part
from orchestrator.model.precision import Precision
from orchestrator.model.repeatable_passes import ExpectedNumbers
from orchestrator.model.tensor_slots import move, tensor_slots
from orchestrator.model.values_on_demand import ValuesOnDemand, without_memory
from orchestrator.planning.mesh import Mesh
from orchestrator.state.model_state import own_tensors
from orchestrator.strategies.constructor import constructor_of
from orchestrator.strategies.kept_state import KeptState
from orchestrator.strategies.measure.job_metrics import BatchMetrics, EvalSums, evaluation_metrics
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.reduction import Reduction, Weight, divisor_of
from orchestrator.strategies.whole_exchange import Exchange, Gradients, dense
from orchestrator.strategies.whole_model import WholeModel

LOSS, EVALUATION, NORM = "loss", "evaluation", "norm of the gradient"
COPIES = 4
"""The whole model, its gradients, what is kept of it, and another part of each on its rank."""


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Real samples, as the ranks of a run divide them.

    Attributes:
        replicas: the slices of each replica of the model, as pairs of inputs and targets. Further replicas have the
            same again, in turn.
        counts: how many replicas have each of these.
        rows: the samples of a slice.
        parts: the micro-batches that a slice is cut into.
        together: whether layers see the samples of all replicas at once.
    """

    replicas: Sequence[Sequence[tuple[Any, Any]]]
    counts: Sequence[int]
    rows: int
    parts: int
    together: bool = False

    def joined(self) -> Batches:
        """Return them as those of one replica, whose slices have the samples of all."""
        given = [self.of(number) for number, count in enumerate(self.counts) for _ in range(count)]
        device = next((tensor.device for tensor in tensors_in(given)), torch.device("cpu"))
        slices = [join(of_all, device) for of_all in zip(*given, strict=True)]
        return replace(self, replicas=[slices], counts=[1], rows=self.rows * len(given))

    def of(self, replica: int) -> Sequence[tuple[Any, Any]]:
        """Return the slices of a replica, which passes may change."""
        return [map_tensors(torch.clone, pair) for pair in self.replicas[replica % len(self.replicas)]]

    def cut(self, slices: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Return what passes through the model at once, of some slices."""
        size = self.rows // self.parts
        numbers = range(self.parts)
        return [
            tuple(rows_between(tree, n * size, (n + 1) * size) if self.parts > 1 else tree for tree in pair)
            for pair in slices
            for n in numbers
        ]

    @property
    def samples(self) -> int:
        """The number of different samples."""
        return self.rows * sum(map(len, self.replicas))


@dataclass(frozen=True, kw_only=True)
class Passed:
    """What the passes through a model have computed.

    Attributes:
        figures: the loss and the norm of the gradient, and loss and metrics of an evaluation, by name.
        gradients: what is known of those of the trained parameters; None if only an evaluation was made.
        buffers: those that forward passes have changed, as the first replica leaves them.
        drew: whether random numbers were drawn, and replaced by their expected values.
        dtypes: the 16-bit types in which the model has computed something.
    """

    figures: Mapping[str, float]
    gradients: Gradients | None
    buffers: Mapping[str, Tensor]
    drew: bool
    dtypes: Collection[torch.dtype]


class CutShortError(Exception):
    """The run stops before the passes are made."""


class Undivided:
    """The whole model, with the values that the ranks have. Its gradients go to the ranks that have their parts."""

    def __init__(
        self,
        job: Job,
        context: Context,
        precision: Precision,
        exchange: Exchange,
        *,
        is_cut: Callable[[], bool],
        most_bytes: int,
    ):
        """Build it.

        Args:
            job: builds the model and defines the loss.
            context: of the first rank.
            precision: what passes compute in.
            exchange: has the values, and takes the gradients.
            is_cut: returns whether the run stops.
            most_bytes: the memory for parameters, their gradients and copies. With less than these need, each
                parameter has its values while it is used, and gradients are passed on in the backward passes.
        """
        self._job = job
        self._context = replace(context, mesh=Mesh(), global_rank=0, pipeline=None)
        self._exchange = exchange
        self._is_cut = is_cut
        self._rounding = 0.0, context.seed
        self._on_demand: ValuesOnDemand | None = None
        fits = COPIES * exchange.nbytes <= most_bytes
        with kept_generators(context.device):
            self._whole = WholeModel(job, context, precision, model=None if fits else self._without_values(precision))
        self.model = self._whole.model
        exchange.describe(self.model)
        tensors, parameters = own_tensors(self.model), dict(self.model.named_parameters())
        own = {name: tensors[name] for name in tensors.keys() & exchange.names}
        if not fits:
            held = {own.pop(name): None for name in [*own] if isinstance(own[name], nn.Parameter)}
            on_demand = {name: parameter for name, parameter in parameters.items() if parameter in held}
            self._on_demand = ValuesOnDemand(on_demand, self._fill, most_bytes=most_bytes // 2)
            self._pass_on(on_demand, most_bytes=most_bytes // 4)
        exchange.fill(own)
        self._kept = KeptState([self.model], parameters.values() if fits else (), others=[job])

    def _without_values(self, precision: Precision) -> nn.Module:
        """Build the model with parameters without memory where ranks have some."""
        context, names = self._context, self._exchange.names_of_parameters
        build = constructor_of(self._job, context.train, precision)
        model = build_part(build, lambda name: name not in names, seed=context.seed)
        slots = [*tensor_slots(model)]
        move([slot for slot in slots if not isinstance(slot.tensor, FakeTensor)], context.device)
        fakes = [slot for slot in slots if isinstance(slot.tensor, FakeTensor)]
        empty = {id(slot.tensor): without_memory(slot.tensor, context.device) for slot in fakes}
        for slot in fakes:
            slot.fill(empty)
        return model

    def _pass_on(self, named: Mapping[str, nn.Parameter], *, most_bytes: int) -> None:
        """Pass gradients on in the backward passes, as soon as they have that many bytes."""

        def pass_on(_: Tensor) -> None:
            if sum(p.grad.nbytes for p in named.values() if p.grad is not None) > most_bytes:
                self._give_gradients()

        for parameter in named.values():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(pass_on)

    def _give_gradients(self) -> None:
        """Pass all gradients on to the ranks."""
        named = {name: p for name, p in self.model.named_parameters() if p.grad is not None}
        self._exchange.add({name: dense(p.grad) for name, p in named.items() if p.grad is not None})
        for parameter in named.values():
            parameter.grad = None

    def passed(self, batches: Batches, *, seed: int, rounding: float = 0.0) -> Passed:
        """Train on the batches without an update, and evaluate some of them. The model is left as it was.

        Args:
            batches: the samples.
            seed: seeds the random generators before the passes of each replica.
            rounding: by what share of itself each entry of the parameters is moved, up or down.

        Raises:
            CutShortError: the run stops.
        """
        demand = self._on_demand or contextlib.nullcontext()
        with kept_generators(self._context.device), demand, ExpectedNumbers(communicates=True) as numbers:
            try:
                begin = functools.partial(self._begin, seed, rounding)
                figures, gradients, buffers = self._train(batches, begin)
                figures = {**figures, **self._evaluate(batches, begin)}
            finally:
                self._kept.restore()
                self.model.zero_grad()
        return Passed(figures=figures, gradients=gradients, buffers=buffers, drew=numbers.drew, dtypes=numbers.dtypes)

    @torch.no_grad()
    def _begin(self, seed: int, rounding: float) -> None:
        """Begin the passes of a replica with the model as it was."""
        self._check_cut()
        self._kept.restore()
        seed_generators(seed)
        if self._on_demand is None:
            _round(self.model.parameters(), rounding, seed)
        elif (rounding, seed) != self._rounding:
            self._on_demand.forget()
        self._rounding = rounding, seed

    def _check_cut(self) -> None:
        if self._is_cut():
            raise CutShortError("the run stops")

    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        self._check_cut()
        self._exchange.fill(tensors)
        _round(tensors.values(), *self._rounding)

    def _train(self, batches: Batches, begin: Any) -> tuple[dict[str, float], Gradients, dict[str, Tensor]]:
        batches = batches.joined() if batches.together else batches
        cut = [batches.cut(batches.of(replica)) for replica in range(len(batches.replicas))]
        slices = [part for of_replica in cut for part in of_replica]
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        after: dict[str, Tensor] = {}

        def end() -> None:
            named = self.model.named_buffers()
            after.update({n: b.clone() for n, b in named if n not in before or not torch.equal(b, before[n])})

        reduction = _InTurn(batches.counts, len(cut[0]), begin=begin, end_first=end)
        train = replace(
            self._context.train,
            global_batch_size=len(slices) * batches.rows // batches.parts,
            grad_accumulation=len(slices),
        )
        context = replace(self._context, train=train)
        self._exchange.begin()
        loss_sum, weight = self._whole.backward(slices, reduction, BatchMetrics(None), context=context, factor=1.0)
        self._give_gradients()
        gradients = self._exchange.measured()
        return {LOSS: float(loss_sum) / (float(weight) or 1.0), NORM: gradients.norm}, gradients, after

    def _evaluate(self, batches: Batches, begin: Any) -> dict[str, float]:
        sums: dict[str, float] = {}
        measure = functools.partial(evaluation_metrics, self._job)
        for replica, count in enumerate(batches.counts):
            begin()
            for part in batches.cut(batches.of(replica)[:1]):
                found = self._whole.evaluate(part, batches.rows // batches.parts, measure)
                for name, value in sums_of(found).items():
                    sums[name] = sums.get(name, 0.0) + count * value
        weight = sums.pop("weight") or 1.0
        return {f"{EVALUATION} {name}": value / weight for name, value in sums.items()}


def sums_of(found: EvalSums) -> dict[str, float]:
    """Return what an evaluation has summed, by name."""
    metrics = {name: float(value) for name, value in found.metrics.items()}
    return {LOSS: float(found.loss_sum), "weight": float(found.weight), **metrics}


def _round(parameters: Iterable[Tensor], share: float, seed: int) -> None:
    """Move each entry up or down by a share of itself."""
    for parameter in parameters if share else ():
        if parameter.is_floating_point():
            places = torch.arange(parameter.numel(), device=parameter.device, dtype=torch.float64)
            parameter.mul_(1 + share * (places + seed).square().sin().sign().view_as(parameter))


class _InTurn(Reduction):
    """Weighs the parts of several replicas, whose passes one rank makes one after another."""

    def __init__(self, counts: Sequence[int], parts: int, *, begin: Any, end_first: Any):
        """
        Args:
            counts: how often each replica counts.
            parts: the number of parts that each has.
            begin: called before those of each replica.
            end_first: called after those of the first.
        """
        self._counts = [count for count in counts for _ in range(parts)]
        self._parts = parts
        self._begin = begin
        self._end_first = end_first
        self._number = 0

    def weigh(self, job: Job, targets: Sequence[object], rows: Sequence[int]) -> tuple[Sequence[Weight], Weight]:
        weights, _ = super().weigh(job, targets, rows)
        counted = [weight * count for weight, count in zip(weights, self._counts, strict=True)]
        return counted, divisor_of(sum(counted))

    @contextlib.contextmanager
    def around_slice(self, *, last: bool) -> Iterator[None]:
        if self._number % self._parts == 0:
            self._begin()
        self._number += 1
        yield
        if self._number == self._parts:
            self._end_first()
