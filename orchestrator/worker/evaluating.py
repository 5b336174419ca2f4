"""The evaluations of a run: what a rank computes of each, and what follows from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from orchestrator.compat.generators import kept_generators
from orchestrator.job import Job
from orchestrator.protocol.messages import Assignment, EvalPoint
from orchestrator.state.best import BestSoFar
from orchestrator.strategies.base import Strategy
from orchestrator.user_code.callbacks import set_current_step
from orchestrator.worker.control.control import Outbox
from orchestrator.worker.data.job_data import JobData
from orchestrator.worker.reports.after_evaluation import Improvement, Steered, check_trial
from orchestrator.worker.reports.evaluation import evaluate
from orchestrator.worker.reports.job_reports import JobReports


class Evaluations:
    """Evaluates the model on one rank, and lets the run follow what is measured.

    Attributes:
        assignment: the place of the rank, which each generation sets anew.
        improvement: the best evaluation so far.
        steered: the job and its strategy, which change with the evaluations.
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
    ):
        """
        Args:
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

    def has_any(self, data: JobData) -> bool:
        """Return whether there is anything to do: data to evaluate, or samples to draw."""
        return bool(data.datasets.evaluated) or self._job.draws_samples

    def make(self, data: JobData, *, step: int) -> None:
        """Evaluate the model after ``step`` if there is data for it, and draw samples from it if the job has any."""
        with self._strategy.quiesced(), self._strategy.evaluation_weights():
            if data.datasets.evaluated:
                rank, world_size = self.assignment.global_rank, self.assignment.plan.world_size
                self.steered.rewind(step, rank=rank, world_size=world_size)
                point = self._evaluated(data, data.eval_batches, step=step)
                self._outbox.put_point(point)
                for follower in (self.improvement, self.steered, self._reports):
                    follower.add(point, rank=rank, world_size=world_size, confirm=self._strategy.confirm)
            if self._job.draws_samples:
                with self._averaged_weights():
                    self._reports.sample(step=step)

    def try_out(self, data: JobData, *, step: int) -> None:
        """Evaluate a few samples, of which nothing is reported. Random numbers and buffers do not depend on it."""
        with (
            self._strategy.quiesced(),
            self._strategy.evaluation_weights(),
            self._strategy.kept_buffers(),
            kept_generators(self._device),
        ):
            point = self._evaluated(data, data.trial_batches, step=step, trial=True)
            check_trial(
                point,
                (self.improvement, self.steered),
                world_size=self.assignment.plan.world_size,
                device=self._device,
                confirm=self._strategy.confirm,
            )

    def metadata(self) -> dict[str, Any]:
        """Return what a checkpoint says of the evaluations so far."""
        return {**self.improvement.metadata(), **self.steered.metadata()}

    @property
    def why_stop(self) -> str | None:
        """Why the run ends before all of its steps; None if the evaluations let it go on."""
        return self.improvement.why_stop or self.steered.why_stop

    def _averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the weights are their moving average, if there is one."""
        has_average = self._config.train.ema_decay is not None
        return self._strategy.averaged_weights() if has_average else contextlib.nullcontext()

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
            point = evaluate(
                self._strategy,
                batches_of(split),
                step=step,
                device=self._device,
                split=split,
                perplexity=self._job.reports_perplexity,
                trial=trial,
                outbox=self._outbox,
            )
            self._strategy.confirm()
            return point

        set_current_step(step)
        with self._strategy.kept_buffers() if self._job.carried else contextlib.nullcontext():
            points = [evaluated(split) for split in data.datasets.evaluated]
            if self._config.train.ema_decay is not None:
                with self._averaged_weights():
                    points = [replace(point, ema=evaluated(point.split)) for point in points]
        return replace(points[0], others=tuple(points[1:]))
