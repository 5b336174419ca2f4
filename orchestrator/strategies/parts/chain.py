"""One rank's stages and the schedule that runs micro-batches through them.

The schedules are those of ``torch.distributed.pipelining``. They pass micro-batch numbers instead of inputs and
targets, which therefore may have any nested structure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from orchestrator.job import Job
from orchestrator.model.batch import first_rows, rows_between
from orchestrator.model.modes import evaluation_mode
from orchestrator.model.precision import Precision, summable
from orchestrator.model.stages.own_stages import Stage
from orchestrator.planning.schedules import PipelineLayout
from orchestrator.strategies.measure.job_metrics import (
    BatchMetrics,
    EvalSums,
    Measure,
    add_metrics,
    is_scalar,
    loss_reads,
)
from orchestrator.strategies.parts.timed_stage import Clock, InputBuffer, TimedStage
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.reduction import Reduction, Weight, weighted, without_gradient
from orchestrator.strategies.sums.sums import Sums
from orchestrator.strategies.transforms.part import Parts
from orchestrator.timeline import Span


class Chain:
    """The stages of this rank, connected to those of the other ranks of its pipeline.

    Attributes:
        feeds: whether the first stage is on this rank, so that it reads the inputs.
        has_loss: whether the last stage is on this rank, so that it computes the loss.
        timed_stages: the stages as the schedule calls them, in ascending order; empty after :meth:`close`.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        layout: PipelineLayout,
        *,
        job: Job,
        parts: Parts,
        rows: int,
        device: torch.device,
        group: dist.ProcessGroup,
        precision: Precision,
        sums: Sums,
        backward_group: dist.ProcessGroup,
    ):
        """Connect the stages.

        Args:
            stages: this rank's stages, in ascending order.
            layout: the schedule, the number of micro-batches and which rank has which stage.
            job: defines loss, weight and metrics of what the stages compute.
            parts: what they compute of each sample.
            rows: samples in a micro-batch.
            device: the device of the stages.
            group: the ranks of this pipeline.
            precision: what the forward passes are computed in.
            sums: is told of each backward pass of a micro-batch through a stage.
            backward_group: the ranks of this pipeline, for the gradients of activations; may be ``group``.
        """
        self.feeds = stages[0].inputs is None
        self.has_loss = stages[-1].outputs is None
        self._stages = stages
        self._layout = layout
        self._job = job
        self._parts = parts
        self._rows = rows
        self._device = device
        self._group: dist.ProcessGroup | None = group
        self._precision = precision
        self._sums = sums
        self.clock = Clock(device)
        self._inputs = InputBuffer()
        self._targets: list[Any] = []
        self._weights: Sequence[Weight] = []
        self._divisor: Weight = 1.0
        self._metrics = BatchMetrics()
        self._loss_sum = torch.zeros(())
        self.timed_stages = [
            TimedStage(
                stage,
                num_stages=layout.num_stages,
                device=device,
                group=group,
                clock=self.clock,
                inputs=self._inputs,
                precision=precision,
                passed=sums.passed,
                backward_group=backward_group,
            )
            for stage in stages
        ]
        cls: Any = get_schedule_class(layout.schedule)
        takes_several_stages = issubclass(cls, PipelineScheduleMulti)
        self._schedule: Any = cls(
            self.timed_stages if takes_several_stages else self.timed_stages[0],
            layout.num_microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def backward(
        self, slices: Sequence[Any], reduction: Reduction, metrics: BatchMetrics, *, context: Context, factor: float
    ) -> tuple[Tensor, Weight]:
        """See ``WholeModel.backward``; the parts are the micro-batches of every slice."""
        weights: Sequence[Weight] = []
        if self.has_loss:
            targets = [part for _, target in slices for part in self.microbatches(target)]
            weights, total = reduction.weigh(self._job, targets, [self._rows] * len(targets))
            self._divisor = total / factor
        self._loss_sum = torch.zeros((), device=self._device)
        self._metrics = metrics
        m = self._layout.num_microbatches
        self._sums.begin_step(passes=len(slices) * m)
        for number, batch in enumerate(slices):
            self.clock.first_microbatch = number * m
            if self.feeds:
                self._inputs.microbatches = self._inputs_of(batch[0])
            if self.has_loss:
                self._targets, self._weights = self.microbatches(batch[1]), weights[number * m : (number + 1) * m]
            self._run_schedule()
        return self._loss_sum, sum(weights)

    def evaluate(self, batch: tuple[Any, Any], valid: int, measure: Measure) -> EvalSums:
        """See ``WholeModel.evaluate``; zeros on ranks that do not have the loss."""
        assert self._group is not None
        device = self._device
        inputs, target = batch if self.feeds or self.has_loss else (None, None)
        modules = [stage.module for stage in self._stages]
        with evaluation_mode(*modules), torch.no_grad(), self._precision.autocast():
            outputs = forward_only(
                self._stages,
                self._inputs_of(inputs) if self.feeds else [],
                layout=self._layout,
                group=self._group,
                device=device,
            )
            loss_sum, total = torch.zeros((), device=device), torch.zeros((), device=device)
            sums: dict[str, Tensor] = {}
            targets = self.microbatches(target)
            for number, output in enumerate(outputs):
                rows = min(max(valid - number * self._rows, 0), self._rows)
                if rows == 0:
                    continue
                output = self._precision.outputs(self._parts.whole(output))
                output = first_rows(output, rows)
                wanted = first_rows(targets[number], rows)
                weight = self._job.weight(wanted)
                weight = rows if weight is None else weight
                loss = self._job.loss(output, wanted)
                if rows < self._rows and loss_reads(self._job, output, wanted, is_scalar):
                    raise ValueError(
                        "the loss has a part that the model has computed over a whole batch, so it counts the padding "
                        "of the last evaluation batch; compute it in Job.loss, or use strategy=ddp"
                    )
                loss_sum += weighted(loss, weight)
                total += weight
                add_metrics(sums, measure(output, wanted))
        return EvalSums(loss_sum=loss_sum, weight=total, metrics=sums)

    def microbatches(self, value: Any) -> list[Any]:
        """Cut the tensors of a slice into micro-batches along their first dimension."""
        return [
            rows_between(value, number * self._rows, (number + 1) * self._rows)
            for number in range(self._layout.num_microbatches)
        ]

    def _inputs_of(self, value: Any) -> list[Any]:
        """Return what the first stage is called with for each micro-batch of a slice."""
        return [self._parts.begin(self._job, part) for part in self.microbatches(value)]

    def spans(self) -> tuple[Span, ...]:
        """Return what the stages did in the last :meth:`train`."""
        return self.clock.spans()

    def close(self) -> None:
        """Release everything that refers to the process group. The chain cannot be used afterwards."""
        self._group = None
        self._schedule = None
        self.timed_stages = []
        del self._sums

    def _run_schedule(self) -> None:
        numbers = torch.arange(self._layout.num_microbatches)
        self._schedule.step(
            *([numbers] if self.feeds else []), target=numbers if self.has_loss else None, return_outputs=False
        )

    def _loss(self, _: Any, number: Tensor) -> Tensor:
        """Return the weighted loss of the micro-batch that the last stage has just processed."""
        last = self.timed_stages[-1]
        target, weight = self._targets[int(number)], self._weights[int(number)]
        with self.clock.span("F", last.stage_index, int(number)), self._precision.autocast():
            without_gradient(last.output, weight)
            loss = self._job.loss(last.output, target)
            self._metrics.add(self._metrics.of(last.output, target))
        last.output = None
        self._loss_sum += weighted(loss.detach(), weight)
        return summable(loss) * (weight / self._divisor)


def forward_only(
    stages: Sequence[Stage],
    inputs: Sequence[Any],
    *,
    layout: PipelineLayout,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Iterator[Any]:
    """Run the forward pass of every micro-batch, and yield the model's outputs one at a time, to hold only one.

    Every rank must read all of it, also where nothing is yielded: a rank that stops sends nothing to the others.

    All ranks go through :func:`forward_steps` and exchange activations after each step, each rank in one batch. NCCL
    does not buffer sends, so ranks that send to each other must receive at the same time.

    Args:
        stages: this rank's stages, in ascending order.
        inputs: the model's inputs, one per micro-batch; read only on the rank of the first stage.
        layout: which rank has which stage, and the number of micro-batches.
        group: the ranks of the pipeline.
        device: where received activations are placed.

    Yields:
        The output of each micro-batch, in order, on the rank of the last stage; nothing on the other ranks.
    """
    own = {stage.index: stage for stage in stages}
    arrived: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # by stage and micro-batch
    for step in forward_steps(layout):
        exchange: list[dist.P2POp] = []
        finished: list[Any] = []
        for index, number in step:
            stage, following = own.get(index), own.get(index + 1)
            if stage is not None:
                value = inputs[number] if stage.inputs is None else stage.inputs.unpack(arrived.pop((index, number)))
                out = stage.computed(stage.module(value))
                if stage.outputs is None:
                    finished.append(out)
                    continue
                tensors = stage.outputs.pack(out)
                if following is not None:
                    arrived[index + 1, number] = tensors
                else:
                    to = layout.stage_ranks[index + 1]
                    exchange += [dist.P2POp(dist.isend, t, group=group, group_peer=to) for t in tensors]
            elif following is not None:
                assert following.inputs is not None
                tensors = following.inputs.examples(device)
                arrived[index + 1, number] = tensors
                sender = layout.stage_ranks[index]
                exchange += [dist.P2POp(dist.irecv, t.detach(), group=group, group_peer=sender) for t in tensors]
        for work in dist.batch_isend_irecv(exchange) if exchange else []:
            work.wait()
        yield from finished


def forward_steps(layout: PipelineLayout) -> Iterator[list[tuple[int, int]]]:
    """Yield, step by step, which stages process which micro-batches: at most one on each rank.

    Of its stages that have a micro-batch to process, a rank takes the first one.
    """
    m = layout.num_microbatches
    done = [0] * layout.num_stages
    while done[-1] < m:
        chosen: dict[int, int] = {}
        for stage, rank in enumerate(layout.stage_ranks):
            if done[stage] < (done[stage - 1] if stage else m):
                chosen.setdefault(rank, stage)
        yield [(stage, done[stage]) for stage in chosen.values()]
        for stage in chosen.values():
            done[stage] += 1
