"""The whole model on one rank, and what passes of it leave of the batches that the ranks of a run compute together.

The batch is divided as the ranks divide it: a loss or a layer that compares samples sees the same of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import kept_generators, seed_generators
from orchestrator.job import Job
from orchestrator.model.batch import join, map_tensors, rows_between, tensors_in
from orchestrator.model.precision import Precision
from orchestrator.model.repeatable_passes import ExpectedNumbers
from orchestrator.planning.mesh import Mesh
from orchestrator.state.model_state import own_tensors
from orchestrator.strategies.kept_state import KeptState
from orchestrator.strategies.measure.job_metrics import BatchMetrics, EvalSums, evaluation_metrics
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.reduction import Reduction, Weight, divisor_of
from orchestrator.strategies.whole_model import WholeModel

LOSS, EVALUATION, NORM = "loss", "evaluation", "norm of the gradient"


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
        gradients: of the trained parameters, by their first names.
        buffers: those that forward passes have changed, as the first replica leaves them.
        drew: whether random numbers were drawn, and replaced by their expected values.
    """

    figures: Mapping[str, float]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    drew: bool


class Undivided:
    """The whole model, with the values that the ranks have."""

    def __init__(self, job: Job, context: Context, precision: Precision, values: Mapping[str, Tensor]):
        """Build it. ``values``: of its parameters and buffers, by name; others have initial values."""
        self._job = job
        self._context = replace(context, mesh=Mesh(), global_rank=0, pipeline=None)
        with kept_generators(context.device):
            self._whole = WholeModel(job, context, precision)
        self.model = self._whole.model
        own = own_tensors(self.model)
        with torch.no_grad():
            for name in values.keys() & own.keys():
                own[name].copy_(values[name])
        self._kept = KeptState([self.model], self.model.parameters(), others=[job])

    @property
    def aliases(self) -> Mapping[str, Sequence[str]]:
        """All names of each parameter, by the first."""
        first = {parameter: name for name, parameter in self.model.named_parameters()}
        found: dict[str, list[str]] = {name: [] for name in first.values()}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            found[first[parameter]].append(name)
        return found

    def passed(self, batches: Batches, *, trains: bool, seed: int, rounding: float = 0.0) -> Passed:
        """Train on the batches without an update, and evaluate some of them. The model is left as it was.

        Args:
            batches: the samples.
            trains: whether to compute more than an evaluation.
            seed: seeds the random generators before the passes of each replica.
            rounding: by what share of itself each entry of the parameters is moved, up or down.
        """
        with kept_generators(self._context.device), ExpectedNumbers(communicates=True) as numbers:
            try:
                begin = functools.partial(self._begin, seed, rounding)
                figures, gradients, buffers = self._train(batches, begin) if trains else ({}, {}, {})
                figures = {**figures, **self._evaluate(batches, begin)}
            finally:
                self._kept.restore()
                self.model.zero_grad()
        return Passed(figures=figures, gradients=gradients, buffers=buffers, drew=numbers.drew)

    @torch.no_grad()
    def _begin(self, seed: int, rounding: float) -> None:
        """Begin the passes of a replica with the model as it was."""
        self._kept.restore()
        seed_generators(seed)
        if rounding:
            for parameter in self.model.parameters():
                if parameter.is_floating_point():
                    places = torch.arange(parameter.numel(), device=parameter.device, dtype=torch.float64)
                    parameter.mul_(1 + rounding * (places + seed).square().sin().sign().view_as(parameter))

    def _train(self, batches: Batches, begin: Any) -> tuple[dict[str, float], dict[str, Tensor], dict[str, Tensor]]:
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
        loss_sum, weight = self._whole.backward(slices, reduction, BatchMetrics(None), context=context, factor=1.0)
        gradients = {name: dense(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        norm = float(nn.utils.get_total_norm(gradients.values()))
        figures = {LOSS: float(loss_sum) / (float(weight) or 1.0), NORM: norm}
        return figures, gradients, after

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


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense tensor."""
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()


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
