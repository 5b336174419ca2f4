"""The evaluations of a run: what a rank computes of each, and what follows from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from orchestrator.compat.generators import kept_generators
from orchestrator.job import Job
from orchestrator.protocol.messages import Assignment, EvalPoint
from orchestrator.state.best import BestSoFar
from orchestrator.strategies.base import Strategy
from orchestrator.user_code.callbacks import set_current_step
from orchestrator.worker.control.control import CutOff, Outbox, StepGate
from orchestrator.worker.data.job_data import JobData
from orchestrator.worker.reports.after_evaluation import Improvement, Steered, check_trial
from orchestrator.worker.reports.evaluation import Interruptible, evaluate
from orchestrator.worker.reports.job_reports import JobReports

CUT_OFF = "cut_off"
"""The key in a checkpoint's metadata of what a stop has cut off after its step."""
Task = Literal["evaluation", "samples"]


class Evaluations:
    """Evaluates the model on one rank, and lets the run follow what is measured.

    Attributes:
        assignment: the place of the rank, which each generation sets anew.
        improvement: the best evaluation so far.
        steered: the job and its strategy, which change with the evaluations.
        cut_off: the step after which a stop has cut something off, and everything from there on; None if nothing.
    """

    def __init__(
        self,
        assignment: Assignment,
        job: Job,
        strategy: Strategy,
        *,
        saved: Callable[[BestSoFar], BestSoFar],
        reports: JobReports,
        device: torch.device,
        outbox: Outbox,
        gate: StepGate,
        interruptible: Interruptible,
    ):
        """
        Args:
            gate: cuts evaluations off.
            interruptible: makes the calls of predictions.
            saved: see :class:`Improvement`.
            reports: is told of each evaluation, and draws samples.
        """
        self.assignment = assignment
        self._config = assignment.config
        self.improvement = Improvement(self._config, device=device, outbox=outbox, saved=saved)
        self.steered = Steered(self._config, job, strategy, device=device)
        self._job = job
        self._strategy = strategy
        self._reports = reports
        self._device = device
        self._outbox = outbox
        self._gate = gate
        self._interruptible = interruptible
        self.cut_off: tuple[int, Task] | None = None
        self._was_cut_off = False

    def has_any(self, data: JobData) -> bool:
        """Return whether there is anything to do: data to evaluate, or samples to draw."""
        return bool(data.datasets.evaluated) or self._job.draws_samples

    def make(self, data: JobData, *, step: int) -> None:
        """Evaluate the model after ``step`` if there is data for it, and draw samples from it if the job has any.

        Only the samples, if a stop has cut them off alone.

        Raises:
            CutOff: the ranks have to stop. What is missing is :attr:`cut_off`.
        """
        task: Task = "samples" if self.cut_off == (step, "samples") else "evaluation"
        try:
            with self._strategy.quiesced(), self._strategy.weights_to_evaluate():
                if task == "evaluation":
                    self._evaluate(data, step=step)
                    task = "samples"
                if self._job.draws_samples:
                    self._gate.begin_section(step, self.assignment.generation)
                    with self._averaged_weights():
                        self._reports.sample(step=step)
        except CutOff:
            self.cut_off, self._was_cut_off = (step, task), True
            raise
        self.cut_off = None

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Continue from the metadata of a checkpoint of this run."""
        if (found := meta.get(CUT_OFF)) is not None:
            self.cut_off, self._was_cut_off = (found["step"], found["task"]), True

    def _evaluate(self, data: JobData, *, step: int) -> None:
        if data.datasets.evaluated:
            rank, world_size = self.assignment.global_rank, self.assignment.plan.world_size
            self.steered.rewind(step, rank=rank, world_size=world_size)
            point = self._evaluated(data, data.eval_batches, step=step)
            self._gate.begin_section(step, self.assignment.generation)  # so that it counts on all ranks, or on none
            self._outbox.put_point(point)
            for follower in (self.improvement, self.steered, self._reports):
                follower.add(point, rank=rank, world_size=world_size, confirm=self._strategy.hooks.confirm)

    def try_out(self, data: JobData, *, step: int) -> None:
        """Evaluate a few samples, of which nothing is reported. Random numbers and buffers do not depend on it."""
        with (
            self._strategy.quiesced(),
            self._strategy.weights_to_evaluate(),
            self._strategy.kept_buffers(),
            kept_generators(self._device),
        ):
            point = self._evaluated(data, data.trial_batches, step=step, trial=True)
            check_trial(
                point,
                (self.improvement, self.steered),
                world_size=self.assignment.plan.world_size,
                device=self._device,
                confirm=self._strategy.hooks.confirm,
            )

    def metadata(self) -> dict[str, Any]:
        """Return what a checkpoint says of the evaluations so far."""
        found = {**self.improvement.metadata(), **self.steered.metadata()}
        if self._was_cut_off:  # None replaces what a checkpoint of the step has
            found[CUT_OFF] = self.cut_off and {"step": self.cut_off[0], "task": self.cut_off[1]}
        return found

    @property
    def why_stop(self) -> str | None:
        """Why the run ends before all of its steps; None if the evaluations let it go on."""
        return self.improvement.why_stop or self.steered.why_stop

    def _averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the weights are their moving average, if there is one."""
        has_average = self._config.train.ema_decay is not None
        return self._strategy.weights_to_evaluate(averaged=True) if has_average else contextlib.nullcontext()

    def _evaluated(
        self,
        data: JobData,
        batches_of: Callable[[str], Iterator[tuple[Any, int]]],
        *,
        step: int,
        trial: bool = False,
    ) -> EvalPoint:
        """Return this rank's part of an evaluation, or of its ``trial``.

        ``batches_of``: returns what to read of a split.
        """

        def evaluated(split: str) -> EvalPoint:
            self._gate.begin_section(step, self.assignment.generation)
            point = evaluate(
                self._strategy,
                batches_of(split),
                step=step,
                device=self._device,
                split=split,
                perplexity=self._job.reports_perplexity,
                trial=trial,
                outbox=self._outbox,
                interruptible=self._interruptible,
            )
            self._strategy.hooks.confirm()
            return point

        set_current_step(step)
        with self._strategy.kept_buffers() if self._job.carried else contextlib.nullcontext():
            points = [evaluated(split) for split in data.datasets.evaluated]
            if self._config.train.ema_decay is not None:
                with self._averaged_weights():
                    points = [replace(point, ema=evaluated(point.split)) for point in points]
        return replace(points[0], others=tuple(points[1:]))
