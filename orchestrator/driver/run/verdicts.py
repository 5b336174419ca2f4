"""How a run ends: what is said of its last generation, and the verdict."""

from __future__ import annotations

from orchestrator.driver.process.run_context import RunContext, RunResult
from orchestrator.driver.run.run_recorder import RunRecorder, SavedCheckpoints, worker_failed
from orchestrator.driver.run.run_workers import AnyWorkers
from orchestrator.driver.run.worker_reports import WorkerReports
from orchestrator.policy import run_state
from orchestrator.policy.run_state import GenerationEnd, Verdict
from orchestrator.protocol.events import TextSampled


class Verdicts:
    """Judges the end of a run, after it has told what the user should know of its last generation."""

    def __init__(
        self,
        context: RunContext,
        workers: AnyWorkers,
        recorder: RunRecorder,
        checkpoints: SavedCheckpoints,
        reports: WorkerReports,
    ):
        self.spec = context.spec
        self._events = context.events
        self._stop = context.stop
        self._workers = workers
        self._recorder = recorder
        self._checkpoints = checkpoints
        self._reports = reports
        self._runs_script = reports.telemetry.runs_script

    def failed(self, end: GenerationEnd, rank: int, why: str) -> Verdict:
        """End the run with the failure of ``rank``; ``why`` there is no recovery."""
        self._reports.finish_workers(end.outcomes)
        name, last_step = self._workers.name_of(rank), self._reports.telemetry.last_step.get(rank, 0)
        failed = worker_failed(end, rank, name, self.spec.run_dir, last_step=last_step, runs_script=self._runs_script)
        self._events.emit(failed)
        what = f"{failed.what}: {failed.reason}"
        steps = self._workers.plan.steps
        saves = not self._runs_script and self.spec.config.saves
        if saves and end.last_step == steps and not self._checkpoints.why_missing(steps):
            what += f"; the checkpoint of step {steps}, the last one, is saved"
        return run_state.failed(what + (f" ({why})" if why else ""))

    def completed(self, end: GenerationEnd) -> Verdict:
        """End the run after its last step."""
        self._reports.finish_workers(end.outcomes)
        rank_0 = end.outcomes.by_rank.get(0)
        for name, text in (rank_0.texts if rank_0 is not None else {}).items():
            self._events.emit(TextSampled(name=name, text=text))
        ended_early = None if rank_0 is None else rank_0.ended_early
        saves_nothing = not self.spec.config.saves or self._runs_script
        step = end.last_step if ended_early is not None or saves_nothing else self._workers.plan.steps
        missing = None if saves_nothing else self._checkpoints.why_missing(step)
        return run_state.completed(step, ended_early=ended_early, checkpoint_missing=missing)

    def stopped(self, end: GenerationEnd | None) -> Verdict:
        """End the run after a signal; ``end``: what happened in the last generation, None if it cannot be saved."""
        assert self._stop.received is not None
        at_step = end.outcomes.last_step if end is not None and end.outcomes.all_ended("stopped") else None
        if self._stop.is_pruned:
            return run_state.pruned(at_step or max(self._reports.telemetry.last_step.values()))
        saves = not self._runs_script and self.spec.config.saves
        missing = self._checkpoints.why_missing(at_step) if at_step and saves else None
        return run_state.stopped(
            int(self._stop.received),
            self._stop.cause,
            at_step=at_step,
            trained=self._reports.has_trained,
            checkpoint_missing=missing,
            runs_script=self._runs_script,
            held_up_by=None if end is None else end.held_up_by,
            unsaved=None if end is None else end.outcomes.unsaved,
        )

    def result(self, verdict: Verdict) -> RunResult:
        aggregator, summary = self._reports.telemetry.aggregator, self._reports.summary()
        step_s = float(summary.get("step_ms_p50", 0.0)) / 1e3
        return RunResult(
            status=verdict.status,
            exit_code=verdict.exit_code,
            run_dir=self.spec.run_dir.path,
            url=self.spec.run_dir.url,
            reason=verdict.reason,
            summary=summary | self._recorder.summary(step_s=step_s),
            timeline=aggregator.timeline,
            metrics=aggregator.specs(),
        )
