"""The life of a run on the driver: acquire workers, train generation by generation, recover or give up, release."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
import ray.exceptions

from orchestrator.driver.code.worker_code import WorkerCode
from orchestrator.driver.code.worker_variables import worker_variables
from orchestrator.driver.gang.admission import Admission
from orchestrator.driver.gang.gang import Gang
from orchestrator.driver.nodes.node_uploads import NodeUploads
from orchestrator.driver.nodes.node_watch import NodeWatch
from orchestrator.driver.process.calls import GangError, NoWorkersError, UnfitError, check_ray
from orchestrator.driver.process.event_stream import EventStream
from orchestrator.driver.process.origin import this_origin
from orchestrator.driver.process.result import RunResult
from orchestrator.driver.process.run_spec import RunSpec
from orchestrator.driver.process.signals import StopSignals
from orchestrator.driver.process.waiting import Interrupted, TurnLostError, WaitMonitor
from orchestrator.driver.queue.queue_place import QueuePlace
from orchestrator.driver.reporting.job_metadata import add_tracking_page
from orchestrator.driver.reporting.uploads import RecordUpload
from orchestrator.driver.run.generation import Generation
from orchestrator.driver.run.last_checkpoints import wait_for_last_checkpoints
from orchestrator.driver.run.left_reports import record_ranks
from orchestrator.driver.run.resizing import Resizing
from orchestrator.driver.run.run_times import RunTimes
from orchestrator.driver.run.saved_checkpoints import SavedCheckpoints
from orchestrator.driver.run.telemetry import Telemetry
from orchestrator.planning.faults import without_next
from orchestrator.planning.plan import Plan
from orchestrator.policy import verdict
from orchestrator.policy.aggregate import Aggregator
from orchestrator.policy.devices import with_common_precision
from orchestrator.policy.elastic import find_rescue, reassigned
from orchestrator.policy.rank_order import placement_note
from orchestrator.policy.recovery import FailureRecord, GiveUp, RecoveryPlan, decide, plan_after_pause
from orchestrator.policy.transitions import Continuation, Interruption, TransitionLog
from orchestrator.policy.verdict import Verdict
from orchestrator.protocol.events import (
    CheckpointFailed,
    CheckpointSaved,
    Event,
    FirstStepDone,
    MetricsLogged,
    RunStarted,
    TextSampled,
    WorkerFailed,
    WorkerFailure,
    WorkerLost,
    Yielded,
)
from orchestrator.protocol.messages import RecoverableSteps, WorkerEnvironment
from orchestrator.protocol.queue import run_label
from orchestrator.records.lease import Lease, SupersededError
from orchestrator.records.rank_log import log_tail
from orchestrator.strategies import registry
from orchestrator.tracking.uploader import Uploader
from orchestrator.worker.control.spool import spool_files

E = TypeVar("E", bound=WorkerFailure)

FINAL_HEARTBEAT_S = 2.0
"""Wait this long for the heartbeat of a worker that has finished its part."""


class Run:
    """Executes one run. Ray must be connected."""

    def __init__(
        self,
        spec: RunSpec,
        code: WorkerCode,
        events: EventStream,
        stop: StopSignals,
        uploader: Uploader,
        records: RecordUpload,
        lease: Lease,
    ):
        self.spec = spec
        self.config = spec.config
        self._events = events
        self._stop = stop
        self._plan = spec.sizes.initial
        self._node_id = ray.get_runtime_context().get_node_id()
        self._environment = WorkerEnvironment(
            working_dir=None if code.working_dir is not None else str(Path.cwd()),
            import_paths=tuple(str(Path(p).resolve()) for p in sys.path),
            config=self.config,
            pickled_job=spec.pickled_job,
        )
        self._aggregator = Aggregator(
            mesh=self._plan.mesh,
            global_batch_size=self._plan.global_batch_size,
            tokens_per_sample=spec.tokens_per_sample,
        )
        self._telemetry = Telemetry(
            spec.config, self._plan, self._aggregator, events, uploader, records, show_page=add_tracking_page
        )
        self._nodes = NodeWatch(spec.config.cluster.node_timeout_s)
        self._node_uploads = NodeUploads(spec.run_dir, spec.config.storage, spec.secrets)
        self._lease = lease
        self._queue = QueuePlace(
            spec.queue_entry,
            events,
            stop,
            timeout_s=spec.config.cluster.queue_timeout_s,
            unfit_timeout_s=spec.config.cluster.unfit_timeout_s,
            known_namesakes=spec.known_namesakes,
            reserved=lambda: self._gang.reserved_by_node,
            avoids=lambda: self._admission.trouble(),
        )
        queue = self._queue
        self._monitor = WaitMonitor(events, self._lease, stop, check_turn=queue.check_turn, offer_turn=queue.offer_turn)
        self._admission = Admission(spec, code, self._nodes, self._monitor)
        self._gang = Gang(
            self._plan,
            self._environment,
            code,
            self._nodes,
            self._admission,
            self._monitor,
            variables=worker_variables(self.config.cluster.env, os.environ),
            label=run_label(self._plan.run_name, spec.run_uid),
        )
        self._times = RunTimes(spec.started_at, self._queue, self._gang)
        self._resizing = Resizing(self._gang, spec.sizes)
        self._checkpoints = SavedCheckpoints(spec.run_dir, spec.checkpoint, step=spec.resumed_from_step or 0)
        self._faults = spec.sizes.largest.faults
        self._recoverable_steps: Mapping[int, RecoverableSteps] = {}
        self._transitions = TransitionLog()
        self._placement_note: str | None = None
        self._failures: list[FailureRecord] = []
        self._hangs: list[int] = []  # the step of each
        self._yielded: Generation | None = None  # the last one, while the run waits for its turn after it

    def execute(self) -> RunResult:
        """Train until the run finishes, is stopped or fails. No actor of the run is alive afterwards.

        Returns:
            How the run ended. Its records are still to be closed.

        Raises:
            SupersededError: another driver has taken over the run.
            KeyboardInterrupt, SystemExit: see :class:`StopSignals`.
        """
        spec, plan = self.spec, self._plan
        self._events.emit(
            RunStarted(
                name=plan.run_name,
                run_dir=spec.run_dir.location,
                strategy=plan.strategy,
                job=plan.job,
                world_size=plan.world_size,
                num_shards=plan.mesh.num_servers,
                steps=plan.steps,
                resumed_from_step=spec.resumed_from_step,
                notes=plan.notes,
            )
        )
        self._times.startup_s["driver_s"] = time.time() - spec.started_at
        with contextlib.ExitStack() as at_end:
            at_end.callback(shutil.rmtree, spec.run_dir.spools, ignore_errors=True)
            try:
                with self._nodes, self._queue, self._gang:
                    result = self._result(self._acquire_and_train())
            except SupersededError:
                at_end.pop_all()  # the workers of the other driver write there
                raise
            self._finish_node_uploads()
            return result

    def _finish_node_uploads(self) -> None:
        with contextlib.suppress(GangError):
            check_ray()  # calls to a dead Ray do not return
            if (problem := self._node_uploads.finish()) is not None:
                self._events.warn(problem)

    def _acquire_and_train(self) -> Verdict:
        try:
            with self._stop.raising():
                self._acquire()
                return self._train()
        except (GangError, ray.exceptions.RayError) as e:
            if self._stop.received is not None:
                return self._stopped(self._yielded)
            refused = isinstance(e, UnfitError) and not self._has_trained
            return verdict.refused(str(e)) if refused else verdict.failed(str(e))
        except Interrupted:
            return self._stopped(self._yielded)

    def _acquire(self) -> None:
        """Wait for the turn of the run, and acquire its workers. Raises as :meth:`Gang.acquire`."""
        while True:
            self._queue.wait_for_turn(self._monitor.check)
            began, waited_s = time.perf_counter(), self._times.waited_s
            try:
                self._start_with(self._gang.acquire(self.spec.sizes))
            except TurnLostError:
                self._gang.release()
                continue
            waited_s = self._times.waited_s - waited_s
            self._times.startup_s.setdefault("workers_s", time.perf_counter() - began - waited_s)
            self._choose_precision()
            self._record(state="running", precision=self._environment.config.train.precision)
            return

    def _choose_precision(self) -> None:
        """Choose what all ranks compute in until the run ends."""
        refused = registry.load(self.config.strategy.name).refused_precisions
        train = with_common_precision(self.config.train, self._gang.workers, refused=refused)
        self._environment = replace(self._environment, config=replace(self.config, train=train))

    def _record(self, **values: str) -> None:
        """Set keys of the record of the run."""
        with contextlib.suppress(OSError, ValueError):  # a full disk, for example: the run goes on
            self.spec.run_dir.update_record(**values)

    def _start_with(self, plan: Plan) -> None:
        """Take over the plan for the workers that the cluster has room for."""
        if plan is self._plan:
            return
        most = self._plan.mesh.num_workers
        self._events.note(
            f"the run starts with {plan.mesh.num_workers} of {most} workers, for which there is room; it grows when "
            "there is more"
        )
        self._plan = plan
        self._telemetry.begin_generation(plan, (), self._checkpoints.step)

    def _train(self) -> Verdict:
        """Run one generation after another, until one completes the training or none can follow."""
        recovery_plan: RecoveryPlan | None = None
        number = 0
        while True:
            number += 1
            generation = self._run_generation(number, recovery_plan)
            failed_rank = generation.find_failed_rank()
            self._recoverable_steps = generation.outcomes.survivors()
            paused = generation.pause.reason is not None and generation.outcomes.all_ended("stopped")
            if failed_rank is not None or paused:
                self._collect_last_reports(generation)
            if failed_rank is not None:
                self._failures.append(_failure_record(generation, failed_rank))
                decision = self._recovery(generation, failed_rank)
                if isinstance(decision, Verdict):
                    return decision
            elif not paused or (generation.pause.reason == "preempted" and self._stop.received is not None):
                self._finish_workers(generation)
                return self._conclude(generation)
            elif generation.pause.reason == "yielded":
                recovery_plan = self._yield(generation)
                continue
            else:
                draining = generation.pause.draining
                decision = plan_after_pause(self._recoverable_steps, draining, world_size=self._plan.world_size)
            try:
                recovery_plan = self._transition(generation, failed_rank, decision)
            except (NoWorkersError, Interrupted) as e:
                return self._save_survivors(number + 1, decision, e)

    def _run_generation(self, number: int, recovery_plan: RecoveryPlan | None) -> Generation:
        """Let the workers train until all have ended, one has failed, or all pause."""
        self._note_placement()
        generation = self._make_generation(number)
        self._queue.has_workers()
        self._node_uploads.cover(member.info.node_id for member in self._gang.members)
        record_ranks(self.spec.run_dir, self._plan, self._gang.members, tokens_per_sample=self.spec.tokens_per_sample)
        generation.begin(
            self.spec.run_uid,
            recovery_plan,
            recoverable_steps=self._recoverable_steps,
            checkpoint=self._checkpoints.newest,
            faults=self._faults,
        )
        self._handle(generation.watch())
        if generation.outcomes.all_ended("done"):  # without a first step, if the failure came after the last one
            self._end_transition(number, time.time())
        if generation.health.hung_at is not None:
            self._hangs.append(generation.health.hung_at)
        return generation

    def _recovery(self, generation: Generation, failed_rank: int) -> RecoveryPlan | Verdict:
        """Decide how to go on after a failure; the verdict if the run ends."""
        decision = decide(
            self._failures, self._recoverable_steps, world_size=self._plan.world_size, config=self.config.recovery
        )
        if isinstance(decision, GiveUp) and not generation.stop_sent:
            self._finish_workers(generation)
            return self._give_up(generation, failed_rank, decision.why)
        if isinstance(decision, GiveUp) or not self._continues_after(decision):
            self._finish_workers(generation)
            return self._stopped(generation)
        lost = self._failure_event(WorkerLost, generation, failed_rank, step=generation.last_step())
        self._events.emit(lost)
        if (note := generation.note_of_lost_with(failed_rank)) is not None:
            self._events.note(note)
        return decision

    def _note_placement(self) -> None:
        """Say which parts of the mesh cross nodes, unless it has been said."""
        note = placement_note(self._plan.mesh, [member.info for member in self._gang.members])
        if note is not None and note != self._placement_note:
            self._events.note(note)
        self._placement_note = note

    def _collect_last_reports(self, generation: Generation) -> None:
        """Collect what the workers have reported, also those that have died, on this node or on others."""
        returned = generation.outcomes.returned
        for member in self._gang.members:
            if member.global_rank not in returned:
                spool = self.spec.run_dir.spool(member.info.node_id, member.info.pid)
                self._node_uploads.bring(member.info.node_id, spool_files(spool))
        self._handle(self._telemetry.collect_last_reports(self._gang, self.spec.run_dir, returned=returned))

    def _continues_after(self, decision: RecoveryPlan) -> bool:
        """Return whether to recover from a failure. After a stop, only to save what the survivors hold, and in time."""
        if self._stop.received is None:
            return True
        return decision.sources is not None and self._stop.seconds_ago < self.config.cluster.stop_grace_s

    def _make_generation(self, number: int) -> Generation:
        return Generation(
            number,
            self._gang,
            self._environment,
            self._plan,
            self.spec.run_dir,
            telemetry=self._telemetry,
            stop=self._stop,
            nodes=self._nodes,
            lease=self._lease,
            events=self._events,
            resizing=self._resizing,
            queue=self._queue,
            earlier_hangs=tuple(self._hangs),
        )

    def _handle(self, events: Iterable[Event]) -> None:
        """Act on what workers have reported."""
        for event in events:
            match event:
                case CheckpointSaved() | CheckpointFailed():
                    self._checkpoints.record(event)
                case FirstStepDone():
                    self._begin_steady_training(event)

    def _begin_steady_training(self, event: FirstStepDone) -> None:
        """Act on the first step of a generation, which ends the start of the run or a transition."""
        self._times.begin_training(event)
        self._resizing.refill(self._plan, others_wait=self._queue.others_wait)
        self._end_transition(event.generation, event.time)

    def _end_transition(self, generation: int, at: float) -> None:
        """Record that ``generation`` trains since ``at``, in seconds since the epoch, if a transition led to it."""
        if (recovered := self._transitions.end(generation, at)) is not None:
            self._events.emit(recovered)
            metrics = {"recovery/seconds": recovered.seconds, "recovery/num_workers": float(recovered.num_workers)}
            self._events.emit(MetricsLogged(step=recovered.step, metrics=metrics))

    def _failure_event(self, kind: type[E], generation: Generation, rank: int, *, step: int) -> E:
        """Return an event for the failure of ``rank``; ``step``: the last one before it.

        It names the node, unless the driver and all workers are on one.
        """
        failure = generation.outcomes.failure(rank)
        members = self._gang.members
        nodes = {self._node_id, *(member.info.node_id for member in members)}
        where = f" on {members[rank].info.place}" if len(nodes) > 1 else ""
        return kind(
            rank=rank,
            display_name=self._plan.display_name(rank) + where,
            step=step,
            reason=failure.message,
            traceback=failure.traceback,
            log=this_origin().log(self.spec.run_dir, rank),
            log_tail=failure.log_tail,
        )

    def _transition(self, generation: Generation, failed_rank: int | None, decision: RecoveryPlan) -> RecoveryPlan:
        """Replace the lost workers, or continue with fewer or more of them; returns how the next generation starts."""
        self._transitions.begin(
            Interruption(
                began=generation.pause.began if failed_rank is None else generation.outcomes.failure(failed_rank).time,
                reached=generation.last_step(),
                num_workers=self._plan.mesh.num_workers,
                planned=generation.pause.reason if failed_rank is None else None,
            )
        )
        check_ray()
        if failed_rank is not None:
            for rank in decision.lost:
                self._faults = without_next(self._faults, rank)
        alive = self._alive(decision)
        # A stop is obeyed in the next generation, which can save what survivors hold. Here it ends only the pause.
        can_wait = decision.sources is not None and find_rescue(self._plan, self.spec.sizes, alive) is None
        self._monitor.grace_s = self.config.cluster.stop_grace_s if can_wait else 0.0
        deadline = time.monotonic() + decision.pause_s
        while time.monotonic() < deadline and self._stop.received is None:
            time.sleep(0.1)
        self._recoverable_steps = {
            rank: states for rank, states in self._recoverable_steps.items() if rank not in decision.lost
        }
        self._gang.lose(decision.lost)
        if (assignment := self._resizing.change(self._plan, alive, saved=failed_rank is None)) is None:
            self._gang.replace(decision.lost)
        else:
            decision = reassigned(decision, assignment, self._recoverable_steps)
            self._plan, self._recoverable_steps = assignment.plan, {}
        if decision.sources is None:
            self._checkpoints.find_newest(self._events.warn)
        self._continue_with(decision)
        return decision

    def _yield(self, generation: Generation) -> RecoveryPlan:
        """Release all workers for a run that goes first, and acquire them again when it is this run's turn.

        Returns:
            How the next generation starts: from the checkpoint of the last step.
        """
        to, step = self._queue.yield_to or "another run", generation.last_step()
        workers_before, waited_s = self._plan.mesh.num_workers, self._times.waited_s
        self._queue.begin_yielding()
        self._finish_workers(generation)
        if (why := self._checkpoints.why_missing(step)) is not None:
            self._events.warn(f"the checkpoint of step {step} {why}; the steps after the newest one are repeated")
        self._gang.release()
        self._record(state="waiting")
        self._events.emit(Yielded(step=step, to=to))
        self._monitor.grace_s, self._yielded = 0.0, generation
        self._acquire()
        self._yielded, self._recoverable_steps = None, {}
        self._checkpoints.find_newest(self._events.warn)
        decision = RecoveryPlan(lost=tuple(range(self._plan.world_size)), sources=None, step=0, pause_s=0.0)
        self._transitions.begin(
            Interruption(
                began=generation.pause.began + self._times.waited_s - waited_s,
                reached=step,
                num_workers=workers_before,
                planned="yielded",
            )
        )
        self._continue_with(decision)
        return decision

    def _continue_with(self, decision: RecoveryPlan) -> None:
        """Prepare for the next generation, to which a transition leads."""
        step = self._checkpoints.step if decision.sources is None else decision.step
        workers = self._plan.mesh.num_workers
        self._transitions.continue_with(Continuation(step=step, decision=decision, num_workers=workers))
        self._telemetry.begin_generation(self._plan, decision.lost, step)

    def _alive(self, decision: RecoveryPlan) -> list[int]:
        return [rank for rank in range(self._plan.world_size) if rank not in decision.lost]

    def _save_survivors(self, number: int, decision: RecoveryPlan, error: NoWorkersError | Interrupted) -> Verdict:
        """End the run because of ``error``, in a generation in which the survivors save what they hold."""
        assignment = find_rescue(self._plan, self.spec.sizes, self._alive(decision))
        if assignment is None:
            raise error
        recovery_plan = reassigned(decision, assignment, self._recoverable_steps)
        if recovery_plan.sources is None or recovery_plan.step <= self._checkpoints.step:
            raise error
        self._gang.reassign_ranks(assignment.plan, assignment.before)
        self._plan = assignment.plan
        self._telemetry.begin_generation(self._plan, recovery_plan.lost, recovery_plan.step)
        generation = self._make_generation(number)
        generation.only_saves = True
        generation.begin(
            self.spec.run_uid,
            recovery_plan,
            recoverable_steps={},
            checkpoint=self._checkpoints.newest,
            faults=(),
        )
        self._handle(generation.watch())
        self._finish_workers(generation)
        return verdict.failed(str(error)) if self._stop.received is None else self._stopped(generation)

    def _finish_workers(self, generation: Generation) -> None:
        """Let the living workers finish their checkpoints, and collect their last reports."""
        failed: list[CheckpointFailed] = []
        with contextlib.suppress(GangError, ray.exceptions.RayError):
            failed = wait_for_last_checkpoints(
                self._gang, generation.outcomes.returned, self.config, self._stop, self._lease.check
            )
            everyone = range(self._plan.world_size)
            self._handle(self._telemetry.collect(self._gang, wait_s=FINAL_HEARTBEAT_S, ranks=everyone).events)
        for event in failed:
            self._events.emit(event)
        self._handle(failed)

    def _give_up(self, generation: Generation, rank: int, why: str) -> Verdict:
        """End the run with the failure of ``rank``; ``why`` there is no recovery."""
        raised = generation.outcomes.failure(rank).traceback
        # A worker that died may have left reports of later steps than the driver knew of when it recorded the death.
        step = generation.outcomes.by_rank[rank].step if raised else self._telemetry.last_step.get(rank, 0)
        failed = self._failure_event(WorkerFailed, generation, rank, step=step)
        if not failed.log_tail:
            failed = replace(failed, log_tail=log_tail(self.spec.run_dir.log_file(rank)))
        self._events.emit(failed)
        what = f"{failed.display_name} failed at step {failed.step}: {failed.reason}"
        return verdict.failed(what + (f" ({why})" if why else ""))

    def _conclude(self, generation: Generation) -> Verdict:
        """End the run after a generation without a failure."""
        outcomes, steps = generation.outcomes, self._plan.steps
        rank_0 = outcomes.by_rank.get(0)
        for name, text in (rank_0.texts if rank_0 is not None else {}).items():
            self._events.emit(TextSampled(name=name, text=text))
        if self._stop.received is not None and not outcomes.all_ended("done"):
            return self._stopped(generation)
        return verdict.completed(steps, checkpoint_missing=self._checkpoints.why_missing(steps))

    def _stopped(self, generation: Generation | None) -> Verdict:
        """End the run after a signal; ``generation`` is the last one, None if none was running."""
        assert self._stop.received is not None
        at_step, missing = None, None
        if generation is not None and generation.outcomes.all_ended("stopped"):
            at_step = generation.outcomes.last_step
            missing = self._checkpoints.why_missing(at_step) if at_step > 0 else None
        return verdict.stopped(
            int(self._stop.received),
            self._stop.cause,
            at_step=at_step,
            trained=self._has_trained,
            checkpoint_missing=missing,
        )

    @property
    def _has_trained(self) -> bool:
        """Whether any step was done since the launch."""
        return any(self._telemetry.last_step.values())

    def _result(self, verdict: Verdict) -> RunResult:
        summary: dict[str, Any] = {
            **self._aggregator.summary(),
            **self._telemetry.machine_summary(driver_node=self._node_id),
            "steps": max(self._telemetry.last_step.values(), default=0),
            **self._transitions.summary(),
        }
        step_s = float(summary.get("step_ms_p50", 0.0)) / 1e3
        return RunResult(
            status=verdict.status,
            exit_code=verdict.exit_code,
            run_dir=self.spec.run_dir.path,
            url=self.spec.run_dir.url,
            reason=verdict.reason,
            summary=summary | self._times.summary(self._transitions, step_s=step_s),
            timeline=self._aggregator.timeline,
            metrics=self._aggregator.specs(),
        )


def _failure_record(generation: Generation, rank: int) -> FailureRecord:
    failure = generation.outcomes.failure(rank)
    return FailureRecord(
        rank=rank,
        step=generation.last_step(),
        message=failure.message,
        raised=bool(failure.traceback),
        final=failure.final,
    )
