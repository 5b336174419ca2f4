"""The life of a run on the driver: acquire workers, train generation by generation, recover or give up, release."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time

import ray
import ray.exceptions

from orchestrator.driver.code.worker_code import WorkerCode
from orchestrator.driver.process.calls import GangError, NoWorkersError, UnfitError, check_ray
from orchestrator.driver.process.run_context import RunContext, RunResult
from orchestrator.driver.process.uploads import Uploader
from orchestrator.driver.process.waiting import Interrupted
from orchestrator.driver.reporting import RecordUpload
from orchestrator.driver.run.generation import Generation, Start
from orchestrator.driver.run.run_recorder import RunRecorder, SavedCheckpoints, worker_lost
from orchestrator.driver.run.run_workers import RecoverableByRank, RunWorkers
from orchestrator.driver.run.verdicts import Verdicts
from orchestrator.driver.run.worker_reports import WorkerReports
from orchestrator.planning.faults import without_next
from orchestrator.policy import run_state
from orchestrator.policy.recovery import Failed, FailureRecord, RecoveryPlan, Transition
from orchestrator.policy.run_state import Continuing, GenerationEnd, NextState, Verdict, what_follows
from orchestrator.protocol.events import Continued, Yielded
from orchestrator.records.lease import SupersededError
from orchestrator.strategies import registry


class Run:
    """Executes one run. Ray must be connected."""

    def __init__(self, context: RunContext, code: WorkerCode, uploader: Uploader, records: RecordUpload):
        self.spec = context.spec
        self._context = context
        self._events = context.events
        self._stop = context.stop
        self._workers = RunWorkers(context, code)
        self._recorder = RunRecorder(context, self._workers)
        self._checkpoints = SavedCheckpoints(context)
        self._reports = WorkerReports(
            context,
            self._workers,
            self._recorder,
            self._checkpoints,
            uploader=uploader,
            records=records,
            node_id=ray.get_runtime_context().get_node_id(),
        )
        self._verdicts = Verdicts(context, self._workers, self._recorder, self._checkpoints, self._reports)
        self._uploader = uploader
        self._runs_script = registry.load(self.spec.config.strategy.name).runs_script
        self._faults = self.spec.sizes.largest.faults
        self._failures: list[FailureRecord] = []
        self._hangs: list[int] = []  # the step of each

    def execute(self) -> RunResult:
        """Train until the run finishes, is stopped or fails. No actor of the run is alive afterwards.

        Returns:
            How the run ended. Its records are still to be closed.

        Raises:
            SupersededError: another driver has taken over the run.
            KeyboardInterrupt, SystemExit: see :class:`StopSignals`.
        """
        self._recorder.begin()
        with contextlib.ExitStack() as at_end:
            at_end.callback(shutil.rmtree, self.spec.run_dir.spools, ignore_errors=True)
            try:
                with self._workers:
                    result = self._verdicts.result(self._run_generations())
            except SupersededError:
                at_end.pop_all()  # the workers of the other driver write there
                raise
            self._reports.finish_uploads()
            return result

    def _run_generations(self) -> Verdict:
        """Run one generation after another, until one completes the training or none can follow."""
        plan: RecoveryPlan | None = None
        recoverable: RecoverableByRank = {}
        released_after: GenerationEnd | None = None  # the last generation, while the run waits for its turn after it
        try:
            with self._stop.raising():
                self._acquire()
                for number in itertools.count(1):
                    generation = self._prepare(number, plan, recoverable)
                    generation.begin()
                    end = self._watch(generation)
                    recoverable = end.outcomes.survivors()
                    match self._what_follows(end):
                        case "done":
                            return self._verdicts.completed(end)
                        case "stopped":
                            self._reports.finish_workers(end.outcomes)
                            return self._verdicts.stopped(end)
                        case Failed(rank, why):
                            return self._verdicts.failed(end, rank, why)
                        case "yielding":
                            released_after = end
                            plan, recoverable = self._yield(end), {}
                            released_after = None
                        case Continuing() as state:
                            if end.failure is not None:
                                self._report_loss(generation, end.failure.rank)
                            try:
                                plan, recoverable = self._transition(end, state, recoverable)
                            except (NoWorkersError, Interrupted) as e:
                                return self._save_survivors(number + 1, state.plan, recoverable, e)
        except (GangError, ray.exceptions.RayError) as e:
            if self._stop.received is not None:
                return self._verdicts.stopped(released_after)
            refused = isinstance(e, UnfitError) and not self._reports.has_trained
            return run_state.refused(str(e)) if refused else run_state.failed(str(e))
        except Interrupted:
            return self._verdicts.stopped(released_after)
        raise AssertionError("a generation leads to another one, or to a verdict")

    def _acquire(self) -> None:
        """Wait for the turn of the run, and acquire its workers. Raises as :meth:`RunWorkers.acquire`."""
        workers = self._workers
        plan, began = workers.plan, time.perf_counter() - workers.waited_s
        workers.acquire()
        self._recorder.startup_s.setdefault("workers_s", time.perf_counter() - workers.waited_s - began)
        if workers.plan is not plan:
            self._reports.telemetry.begin_generation(workers.plan, (), self._checkpoints.step)
        self._recorder.enter("running", precision=workers.environment.config.train.precision)

    def _prepare(
        self, number: int, plan: RecoveryPlan | None, recoverable: RecoverableByRank, *, only_saves: bool = False
    ) -> Generation:
        """Return the next generation, which has not begun."""
        workers = self._workers
        start = Start(
            recovery_plan=plan,
            recoverable=recoverable,
            checkpoint=self._checkpoints.newest,
            checkpoint_remote=self._checkpoints.remote,
            faults=() if only_saves else self._faults,
            only_saves=only_saves,
            failures=len(self._failures),
            tracked_as=self._tracked_as() if self._runs_script else None,
        )
        telemetry, hangs = self._reports.telemetry, tuple(self._hangs)
        generation = Generation(number, self._context, workers, start, telemetry=telemetry, earlier_hangs=hangs)
        if not only_saves:
            workers.note_placement()
            workers.turns.has_workers()
            self._reports.begin_generation()
        return generation

    def _tracked_as(self) -> str | None:
        """Return the id of the run on the tracking server, to which the script may log; None if there is none in time.

        Raises:
            Interrupted: a stop was requested.
        """
        tracking = self.spec.config.tracking
        deadline = time.monotonic() + tracking.request_timeout_s
        while tracking.uri is not None and (run_id := self._uploader.run_id()) is None:
            if self._stop.received is not None:
                raise Interrupted
            if time.monotonic() > deadline:
                self._events.warn(
                    f"MLflow has made no run within {tracking.request_timeout_s:g} s (tracking.request_timeout_s); "
                    "what the script itself logs to MLflow goes elsewhere"
                )
                return None
            time.sleep(0.05)
        return None if tracking.uri is None else run_id

    def _watch(self, generation: Generation) -> GenerationEnd:
        """Let the workers train until all have ended, one has failed, or all pause; returns what has happened."""
        self._reports.handle(generation.watch())
        outcomes = generation.outcomes
        if outcomes.all_ended("done"):  # without a first step, if the failure came after the last one
            self._recorder.end_transition(generation.number, time.time())
        if generation.health.hung_at is not None:
            self._hangs.append(generation.health.hung_at)
        if outcomes.any_failed or generation.end().paused is not None:
            self._reports.collect_last(outcomes)
        return generation.end()

    def _what_follows(self, end: GenerationEnd) -> NextState:
        config = self.spec.config
        state = what_follows(
            end,
            self._failures,
            recovery=config.recovery,
            stop_grace_s=config.cluster.stop_grace_s,
            always_restarts=self._runs_script,
        )
        if end.failure is not None:
            self._failures.append(end.failure)
        if state != "stopped":  # whose verdict says so
            for rank, why in end.outcomes.unsaved.items():
                self._events.warn(f"what rank {rank} was to save may be missing: {why}")
        return state

    def _transition(
        self, end: GenerationEnd, state: Continuing, recoverable: RecoverableByRank
    ) -> tuple[RecoveryPlan, RecoverableByRank]:
        """Prepare the workers for the next generation; returns how it starts, and the state that they hold."""
        failure = end.failure
        self._recorder.enter(state.state)
        self._recorder.begin_transition(
            Transition(
                began=end.asked_at if failure is None else end.outcomes.failure(failure.rank).time,
                reached=end.last_step,
                num_workers_before=self._workers.plan.mesh.num_workers,
                planned=end.paused,
            )
        )
        check_ray()
        if failure is not None:
            for rank in state.plan.lost:
                self._faults = without_next(self._faults, rank)
        plan, recoverable = self._workers.change(state.plan, recoverable, saved=failure is None)
        self._continue_with(plan)
        return plan, recoverable

    def _yield(self, end: GenerationEnd) -> RecoveryPlan:
        """Release all workers for a run that goes first, and acquire them again when it is this run's turn.

        Returns:
            How the next generation starts: from the checkpoint of the last step.
        """
        workers, step = self._workers, end.last_step
        to, num_workers, waited_s = workers.turns.yield_to, workers.plan.mesh.num_workers, workers.waited_s
        self._recorder.enter("yielding")
        workers.turns.begin_yielding()
        self._reports.finish_workers(end.outcomes)
        if not self._runs_script and (why := self._checkpoints.why_missing(step)) is not None:
            self._events.warn(f"the checkpoint of step {step} {why}; the steps after the newest one are repeated")
        workers.gang.release()
        self._recorder.enter("waiting")
        self._events.emit(Yielded(step=step, to=to or "another run"))
        self._acquire()
        began = end.asked_at + workers.waited_s - waited_s
        self._recorder.begin_transition(
            Transition(began=began, reached=step, num_workers_before=num_workers, planned="yielded")
        )
        plan = RecoveryPlan(lost=tuple(range(workers.plan.world_size)), sources=None, step=0, pause_s=0.0)
        self._continue_with(plan)
        return plan

    def _continue_with(self, plan: RecoveryPlan) -> None:
        """Prepare the records for the next generation, to which a transition leads."""
        if self._runs_script:  # its first report tells from which step it continues
            self._recorder.continue_with(plan, step=None)
            self._reports.telemetry.begin_generation(self._workers.plan, plan.lost, 0)
            return
        if plan.sources is None:
            self._checkpoints.find_newest()
        step = self._checkpoints.step if plan.sources is None else plan.step
        self._events.emit(Continued(step=step))
        self._recorder.continue_with(plan, step=step)
        self._reports.telemetry.begin_generation(self._workers.plan, plan.lost, step)

    def _save_survivors(
        self, number: int, decision: RecoveryPlan, recoverable: RecoverableByRank, error: NoWorkersError | Interrupted
    ) -> Verdict:
        """End the run because of ``error``, in a generation in which the survivors save what they hold."""
        plan = self._workers.rescue(decision, recoverable, newer_than=self._checkpoints.step)
        if plan is None:
            raise error
        self._reports.telemetry.begin_generation(self._workers.plan, plan.lost, plan.step)
        generation = self._prepare(number, plan, {}, only_saves=True)
        generation.begin()
        self._reports.handle(generation.watch())
        end = generation.end()
        self._reports.finish_workers(end.outcomes)
        return run_state.failed(str(error)) if self._stop.received is None else self._verdicts.stopped(end)

    def _report_loss(self, generation: Generation, rank: int) -> None:
        """Report a failure from which the run recovers."""
        name = self._workers.name_of(rank)
        runs_script = self._reports.telemetry.runs_script
        self._events.emit(worker_lost(generation.end(), rank, name, self.spec.run_dir, runs_script=runs_script))
        if (note := generation.note_of_lost_with(rank)) is not None:
            self._events.note(note)
