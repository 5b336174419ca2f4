"""The training loop, the same for every strategy and rank. It does not use Ray."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.protocol.events import FirstStepDone, ModelCut, Warned
from orchestrator.protocol.messages import Assignment, Outcome, PendingCheckpoint, Phase, RecoverableSteps
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.update.confirmation import confirmation
from orchestrator.user_code.callbacks import Callback, RunEnd, set_current_step
from orchestrator.worker.anomalies import detecting_anomalies
from orchestrator.worker.control.control import CutOff, Outbox, StepGate, Warner, inject_fault
from orchestrator.worker.control.interruption import GRACE_SHARE, Interruption
from orchestrator.worker.control.rendezvous import context_of
from orchestrator.worker.data.job_data import JobData
from orchestrator.worker.evaluating import Evaluations
from orchestrator.worker.measure.step_metrics import NonFiniteError, profiled_steps
from orchestrator.worker.process.process_memory import keep_if_plentiful
from orchestrator.worker.remembered import Remembered
from orchestrator.worker.reports.checkpoints import Checkpoints
from orchestrator.worker.reports.job_reports import JobReports
from orchestrator.worker.restoring import Position, loaded_checkpoint, restore_state
from orchestrator.worker.steps import Steps


class Loop:
    """One rank's training. It outlives a generation: the next one continues with its model and position."""

    def __init__(
        self,
        *,
        assignment: Assignment,
        job: Job,
        strategy: Strategy,
        device: torch.device,
        gate: StepGate,
        outbox: Outbox,
        redactor: Redactor,
        callbacks: Sequence[Callback] = (),
    ):
        self.config: Config = assignment.config
        self.job = job
        self.strategy = strategy
        self.device = device
        self.gate = gate
        self.outbox = outbox
        self.position = Position()
        self.trial: str | None = None  # what is being tried out, in words
        self._run_dir = RunDir(Path(assignment.run_dir), assignment.remote)
        self._data: JobData | None = None
        self._warner = Warner(outbox)
        self._unsaid: list[str] = []  # what would only say again why the first step fails
        strategy.hooks.warn = self._warner.warn_from_any_rank
        self._has_state = False
        interruption = Interruption(
            lambda: gate.is_cut(self.assignment.generation), delay_s=GRACE_SHARE * self.config.cluster.stop_grace_s
        )
        gate.on_change = interruption.look
        self._checkpoints = Checkpoints(assignment, strategy=strategy, outbox=outbox, warner=self._warner)
        self._reports = JobReports(
            job,
            callbacks,
            assignment,
            strategy=strategy,
            device=device,
            outbox=outbox,
            warner=self._warner,
            redactor=redactor,
            interruptible=interruption.run,
        )
        self._checkpoints.on_saved = self._reports.checkpoint_saved
        self._evaluations = Evaluations(
            assignment,
            job,
            strategy,
            saved=self._checkpoints.saved,
            reports=self._reports,
            device=device,
            outbox=outbox,
            gate=gate,
            interruptible=interruption.run,
        )
        self._steps = Steps(
            assignment,
            strategy,
            self.position,
            reports=self._reports,
            device=device,
            outbox=outbox,
            warner=self._warner,
        )
        self.reassign(assignment)

    def reassign(self, assignment: Assignment) -> None:
        """Take the rank of ``assignment``, which may differ from the rank in the generation before."""
        self.assignment = assignment
        self.rank = assignment.global_rank
        self.strategy.reassign(context_of(assignment, self.device))
        self.strategy.hooks.confirm = confirmation(
            self.device,
            functools.partial(self.gate.check, assignment.generation),
            has_peers=assignment.plan.world_size > 1,
            recovers=self.config.recovery.max_failures > 0,
        )
        self._checkpoints.reassign(assignment)
        self._reports.reassign(assignment)
        self._evaluations.assignment = self._steps.assignment = assignment
        self._warner.rank = self.rank
        if self._data is not None:
            self._data.reassign(assignment)

    def run(
        self,
        startup: dict[str, float],
        *,
        wait_for_others: Callable[[], None] = lambda: None,
        store: Store | None = None,
    ) -> Outcome:
        """Train this rank's part of a generation, whose process group has been formed.

        The first call builds the model and the datasets. Later calls continue with them.

        Args:
            startup: receives the duration of each part of the startup, in seconds, up to the end of the first step.
            wait_for_others: waits until all ranks are ready for collective operations, however long they take.
            store: where the ranks of the generation leave messages; None if rank 0 has to write checkpoints alone.

        Returns:
            ``"done"`` or ``"stopped"``, with the state that this rank can provide to the next generation.

        Raises:
            DatasetError: the job's data cannot be used.
            NoUpdateError: no step has made an update.
            NonFiniteError: the loss or a parameter is not finite.
            ModelChangedError: a method of the user that may only look at the model has changed it.
            AbandonedError, PeersMissingError: see :meth:`StepGate.begin`.
            Exception: whatever the job raises, or a broken connection to another rank.
        """
        self.trial = None
        try:
            data = self._build(startup, wait_for_others, store)
            self._reports.run_begins(step=self.position.step)
            with self._nonfinite_advice(), self._steps.compile_meter.watching():
                stopped = False
                try:
                    if self.assignment.sources is not None or self._evaluations.cut_off is not None:
                        self._run_due_tasks()  # because the failure, or the stop, may have interrupted them
                    stopped = not self._only_evaluates and self._run_steps(data, startup)
                except CutOff:
                    stopped = True
                ended_early = None if stopped or self._has_all_steps else self._why_stop
                recoverable = stopped and not self.gate.saves and self.recoverable_steps()
                saves = self.position.step > 0 and not recoverable and self.config.saves
                if saves:
                    self._checkpoint(last=True)  # before the evaluation, which may fail
                ends = not stopped
                if ends and ended_early is None:
                    try:
                        self._evaluate()
                    except CutOff:
                        stopped = True
            self._enter("end")
            self._checkpoints.drain()
            self._evaluations.improvement.confine(rank=self.rank)
            if saves and ends and (metadata := self._evaluations.metadata()):
                self._checkpoints.amend(self.position.step, metadata)
            self.strategy.hooks.confirm()
            if not recoverable:
                self._reports.run_ended(RunEnd(step=self.position.step, stopped=stopped, reason=ended_early))
            return Outcome(
                status="stopped" if stopped else "done",
                step=self.position.step,
                texts={} if stopped else self._reports.texts,
                recoverable_steps=self.recoverable_steps(),
                ended_early=ended_early,
            )
        finally:
            if self._data is not None:
                self._data.close()

    def _build(self, startup: dict[str, float], wait_for_others: Callable[[], None], store: Store | None) -> JobData:
        """Build the model and the data unless that is done, and bring them to the state of the generation."""
        began = time.perf_counter()
        self._enter("build")
        if self._data is None:
            self._data = JobData(
                self.job,
                self.assignment,
                strategy=self.strategy,
                device=self.device,
                gate=self.gate,
                outbox=self.outbox,
                warner=self._warner,
            )
            startup["dataset_s"] = -began + (began := time.perf_counter())
            self.strategy.setup(self._data.sample_source())
        checkpoint = loaded_checkpoint(self.assignment, self.strategy, on_progress=self.outbox.progress)
        wait_for_others()
        self.strategy.attach()
        self._checkpoints.attach(store)
        if self.rank == 0 and self.assignment.generation == 1 and (stages := self.strategy.stage_summaries()):
            self.outbox.put_event(ModelCut(stages=stages))
        for remark in self.strategy.setup_warnings():
            if remark.kind == "not compared":
                self._unsaid.append(remark.text)
            else:
                self._warner.warn(remark.text, topic=remark.text)
        sources = self.assignment.sources
        if sources is not None and sources[self.rank] != self.rank and self.position.step == 0:
            self._has_state = False  # initial values are replaced in place, as others arrive
        restore_state(
            checkpoint,
            self.assignment,
            self.position,
            strategy=self.strategy,
            data=self._data,
            evaluations=self._evaluations,
            device=self.device,
        )
        self._data.check_equal(confirm=self.strategy.hooks.confirm)
        checks = self.config.train.check != "never" and not self._only_evaluates
        if checks and self.assignment.generation == 1 and sources is None:
            compared_at = time.perf_counter()
            self._compare(self._data.sample_source())
            startup["compare_s"] = time.perf_counter() - compared_at
        evaluates = bool(self._data.datasets.evaluated and self.config.train.eval_every)
        if self.assignment.generation == 1 and (note := self._evaluations.steered.note(evaluates=evaluates)):
            self._warner.warn(note, topic=note)
        self._has_state = True
        startup["model_s"] = time.perf_counter() - began - startup.get("compare_s", 0.0)
        return self._data

    def _compare(self, train_set: Any) -> None:
        """Compare what the ranks compute with the whole model, unless that is known."""
        set_current_step(self.position.step + 1)
        remembered = functools.cache(lambda: Remembered(self.assignment, self.device))
        compared = self.strategy.compare_with_whole(
            train_set,
            known=lambda model: self.config.train.check == "auto" and remembered().has(model),
            is_cut=lambda: self.gate.is_cut(self.assignment.generation),
        )
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # training has no second model
        self._unsaid += compared.notes
        if compared.model is not None:
            remembered().add(compared.model)

    def recoverable_steps(self) -> RecoverableSteps:
        """Return the steps whose state this rank can provide, as :meth:`Strategy.recoverable_steps` does.

        It is empty until the model has the state that the generation begins with.
        """
        return self.strategy.recoverable_steps(self.position.step) if self._has_state else {}

    def discard(self, timeout_s: float) -> None:
        """Finish the background work as far as it does not wait for ranks of a generation that has ended."""
        self._checkpoints.end_generation()
        self.finish(timeout_s)

    def finish(self, timeout_s: float) -> PendingCheckpoint | None:
        """Finish the background work. Return the checkpoint that is still being written after ``timeout_s``."""
        return self._checkpoints.finish(timeout_s=timeout_s)

    def _run_steps(self, data: JobData, startup: dict[str, float]) -> bool:
        """Train up to the last step, or until the run ends early. Return True if the driver stops the run before."""
        began = time.perf_counter()
        total_steps, position, steps = self.config.train.steps, self.position, self._steps
        first_step = position.step + 1
        steps.begin()
        micro_batches = data.train_batches(
            samples_consumed=position.samples_consumed, steps=total_steps - position.step
        )
        trace = self._run_dir.profile / f"rank-{self.rank}.json" if self.config.profile else None
        with (
            detecting_anomalies() if self.config.train.detect_anomaly else contextlib.nullcontext(),
            contextlib.closing(micro_batches) as batches,
            profiled_steps(trace) as end_profiled_step,
        ):
            self._enter("train")
            steps.window.timer.restart()
            while not self._has_all_steps and self._why_stop is None:
                step = position.step + 1
                if not self.gate.begin(step, self.assignment.generation):
                    steps.window.check_finite()
                    return True
                result = steps.make(step, batches)
                end_profiled_step()
                if result.skipped and self.rank == 0:
                    self.outbox.put_event(Warned(message=f"step {step} skipped: gradient not finite"))
                if step == first_step:
                    compile_s = steps.compile_meter.seconds
                    startup["first_step_s"] = time.perf_counter() - began - compile_s
                    if compile_s:
                        startup["compile_s"] = compile_s
                    self.outbox.put_event(FirstStepDone(generation=self.assignment.generation, startup=startup))
                    for text in self._unsaid:
                        self._warner.warn(text, topic=text)
                    if self.config.strategy.gathers:
                        keep_if_plentiful(self.assignment.plan.world_size)
                if steps.is_logged(step):
                    steps.log(result, data.samples_per_epoch, data.metrics())
                    self._checkpoints.report()
                steps.save_histograms(step)
                if step == first_step and self.assignment.generation == 1 and not self._has_all_steps:
                    self._try_out(data)
                    data.check_order(confirm=self.strategy.hooks.confirm)
                    steps.window.timer.restart()
                if self._evaluation_due() or self._checkpoint_due():
                    steps.window.check_finite()
                    self._run_due_tasks()
                    steps.window.timer.restart()
        steps.window.check_finite()
        if position.step >= first_step:
            steps.check_updated()
        return False

    def _try_out(self, data: JobData) -> None:
        """Try out a checkpoint and an evaluation, so that what fails in all of them fails before the training.

        Neither losses, nor random numbers, nor buffers depend on it. An error ends the run: it would come again.
        """
        self.trial = "checkpoint"
        self._checkpoints.try_out(self._metadata())
        if data.datasets.evaluated and not self._evaluation_due():
            self.trial = "evaluation"
            self.outbox.enter(self.position.step, "eval")
            self._evaluations.try_out(data, step=self.position.step)
            self.outbox.enter(self.position.step, "train")
        self.trial = None

    def _run_due_tasks(self) -> None:
        """Evaluate and save a checkpoint, each if it is due after the last step."""
        is_best = False
        if self._evaluation_due():
            self._evaluate()
            is_best = self._evaluations.improvement.is_best(self.position.step)
        if (is_best or self._checkpoint_due()) and self._why_stop is None:
            self._checkpoint()

    @property
    def _only_evaluates(self) -> bool:
        return self.config.evaluate is not None

    @property
    def _has_all_steps(self) -> bool:
        return self.position.step >= self.config.train.steps

    @property
    def _why_stop(self) -> str | None:
        """Why the run ends before all of its steps; None if it goes on."""
        return self._evaluations.why_stop or self._reports.why_stop

    def _evaluation_due(self) -> bool:
        assert self._data is not None
        return self._evaluations.has_any(self._data) and self._is_due(self.config.train.eval_every)

    def _checkpoint_due(self) -> bool:
        return self.config.saves and self._is_due(self.config.checkpoint.every)

    def _is_due(self, every: int) -> bool:
        step = self.position.step
        return every > 0 and step % every == 0 and 0 < step < self.config.train.steps and not self._only_evaluates

    def _enter(self, phase: Phase) -> None:
        self.outbox.enter(self.position.step, phase)
        if phase != "train":  # a fault in training is injected after the batch is read
            inject_fault(self.assignment.faults, rank=self.rank, phase=phase, step=self.position.step)

    def _evaluate(self) -> None:
        """Evaluate the model if there is data for it, and draw samples from it if the job has any."""
        assert self._data is not None
        if self._evaluations.has_any(self._data):
            self._enter("eval")
            self._evaluations.make(self._data, step=self.position.step)
            self._enter("train")

    def _checkpoint(self, *, last: bool = False) -> None:
        """Save a checkpoint; ``last`` if no step follows."""
        self._enter("checkpoint")
        step, samples_consumed = self.position.step, self.position.samples_consumed
        self._checkpoints.save(step=step, samples_consumed=samples_consumed, last=last, metadata=self._metadata())
        self._enter("train")

    def _metadata(self) -> dict[str, Any]:
        """Return what a checkpoint of this position says beside the state of the model."""
        assert self._data is not None
        return {**self._data.metadata(self.position.samples_consumed), **self._evaluations.metadata()}

    @contextlib.contextmanager
    def _nonfinite_advice(self) -> Iterator[None]:
        """Add the strategy's advice, if it has any, to an error about numbers that are not finite."""
        try:
            yield
        except NonFiniteError as e:
            e.advice = self.strategy.traits.nonfinite_advice or e.advice
            raise
