"""The training steps of a rank, and what is measured of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from orchestrator.protocol.messages import Assignment
from orchestrator.protocol.metrics import Metric
from orchestrator.records.run_dir import RunDir
from orchestrator.state.model_state import total
from orchestrator.state.transport import gather_json
from orchestrator.strategies.base import StepResult, Strategy
from orchestrator.user_code.callbacks import set_current_step
from orchestrator.worker.control.control import Outbox, Warner, inject_fault
from orchestrator.worker.control.rendezvous import seed_step
from orchestrator.worker.data.batches import epoch_of
from orchestrator.worker.measure.flops import FlopMeter
from orchestrator.worker.measure.step_metrics import CompileMeter, NoUpdateError, Window, lr_of_groups
from orchestrator.worker.reports.histograms import Histograms
from orchestrator.worker.reports.job_reports import JobReports
from orchestrator.worker.restoring import Position

GRAD_NORM_EVERY = 10
"""A logged point has the gradient norm at multiples of this step, or if the step computes it anyway. The pass over all
gradients would otherwise be the largest part of the cost of logging every step."""


class Steps:
    """Makes steps, and measures them. The steps of a generation begin with :meth:`begin`.

    Attributes:
        assignment: the place of the rank, which each generation sets anew.
        compile_meter: measures the compilation of the model, while it is ``watching``.
        window: measures the steps since the last logged point.
    """

    def __init__(
        self,
        assignment: Assignment,
        strategy: Strategy,
        position: Position,
        *,
        reports: JobReports,
        device: torch.device,
        outbox: Outbox,
        warner: Warner,
    ):
        """``position`` goes on with each step, of which ``reports`` is told."""
        self.assignment = assignment
        self._train = assignment.config.train
        self._strategy = strategy
        self._position = position
        self._reports = reports
        self._device = device
        self._outbox = outbox
        self._updates = 0 if assignment.generation == 1 else 1  # another process may have made some before
        run_dir = RunDir(Path(assignment.run_dir), assignment.remote)
        self._histograms = Histograms(run_dir, outbox=outbox, warner=warner, device=device)
        self.compile_meter = CompileMeter(outbox, enabled=self._train.compile is not False)

    def begin(self) -> None:
        """Measure from here on, for the steps of a generation."""
        done, strategy = self._position.step, self._strategy
        # Counting takes time, and the first step ends the start of a run or a recovery.
        at_step = done + 2 if strategy.traits.counts_flops else None
        compiled = self._train.compile is not False
        self._flop_meter = FlopMeter(self._device, at_step=at_step, compiled=compiled, share=strategy.flop_share)
        self.window = Window(device=self._device, total_steps=self._train.steps - done, first_step=done)

    def make(self, step: int, batches: Iterator[list[Any]]) -> StepResult:
        """Make the step number ``step``, from the next of ``batches``."""
        strategy, rank = self._strategy, self.assignment.global_rank
        set_current_step(step)
        seed_step(self.assignment.config.seed, step, strategy.context.mesh.seed_rank(rank))
        with self.window.data_wait.waiting():
            batch = next(batches)
        inject_fault(self.assignment.faults, rank=rank, phase="train", step=step)
        compiled_s = self.compile_meter.seconds
        every = self._train.histograms_every
        observed = every > 0 and step % every == 0
        strategy.hooks.observe = self._histograms.observe if observed else None
        with self._flop_meter.counting(step):
            result = strategy.train_step(
                batch,
                want_grad_norm=self.is_logged(step) and (step % GRAD_NORM_EVERY == 0 or step == 1),
                want_metrics=self.is_logged(step),
            )
        slowed = self.compile_meter.seconds > compiled_s or self._flop_meter.slows(step) or observed
        self.window.add(step, result.loss_sum, result.weight, skipped=result.skipped, slowed=slowed)
        self._updates += not result.skipped
        self._position.step = step
        self._position.samples_consumed += self._train.global_batch_size
        samples_consumed = self._position.samples_consumed
        self._outbox.enter(step, "train")
        self._outbox.tick()
        strategy.after_step(step=step, samples_consumed=samples_consumed)
        self._reports.step_ended(result, step=step, samples_consumed=samples_consumed)
        return result

    def is_logged(self, step: int) -> bool:
        """Return whether a point is logged after ``step``."""
        return step % self._train.log_every == 0 or step in (1, self._train.steps)

    def log(self, result: StepResult, dataset_size: int | None, of_data: Mapping[str, Metric]) -> None:
        """Log a point after the step with this ``result``.

        Args:
            dataset_size: the samples of an epoch, if known.
            of_data: the metrics of the data.
        """
        consumed, strategy = self._position.samples_consumed, self._strategy
        measured = {**self.compile_meter.metrics(), **strategy.metrics(), **of_data}
        point = self.window.close(
            samples_seen=consumed,
            epoch=epoch_of(consumed, dataset_size),
            lr=strategy.group_lrs[0],
            grad_norm=result.grad_norm,
            sums=result.metrics,
            comm_ms=strategy.comm_ms(),
            spans=strategy.spans(),
            metrics={**lr_of_groups(strategy.group_lrs), **measured},
            flops=self._flop_meter.step,
        )
        strategy.hooks.confirm()
        self._outbox.put_point(point)

    def save_histograms(self, step: int) -> None:
        """Save the histograms of ``step``, if they are due after it."""
        if self._strategy.hooks.observe is not None:
            assignment = self.assignment
            self._histograms.save(step=step, rank=assignment.global_rank, world_size=assignment.plan.world_size)
            self.window.timer.restart()

    def check_updated(self) -> None:
        """Check that the ranks together have made an update. A collective operation, if a step may make none.

        Raises:
            NoUpdateError: they have not. No checkpoint of the last step is saved, with which the run would be done.
        """
        train = self._train
        if train.on_nonfinite != "skip" and train.precision != "fp16":
            return
        with self._strategy.quiesced():
            own = {"updates": self._updates if self._strategy.traits.reads_data else 0}
            found = total(gather_json(own, world_size=self.assignment.plan.world_size, device=self._device))
        self._strategy.hooks.confirm()
        if not found["updates"]:
            raise NoUpdateError(on_nonfinite=train.on_nonfinite, precision=train.precision)
