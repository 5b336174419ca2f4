"""Records how a run goes: its state, its transitions from generation to generation, its times, its checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.driver.gang.members import Members
from orchestrator.driver.process.origin import this_origin
from orchestrator.driver.process.run_context import RunContext
from orchestrator.driver.run.run_workers import AnyWorkers
from orchestrator.policy.recovery import RecoveryPlan, Transition, TransitionLog
from orchestrator.policy.run_state import GenerationEnd
from orchestrator.protocol import events
from orchestrator.protocol.messages import PendingCheckpoint
from orchestrator.records.rank_log import log_tail
from orchestrator.records.run_dir import RunDir
from orchestrator.state.checkpoint import path_of
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.manifest import CheckpointError, read_manifest
from orchestrator.storage.remote import StorageError
from orchestrator.worker.base_actor import BaseWorker

E = TypeVar("E", bound=events.WorkerFailure)


class RunRecorder:
    """Records the state of a run and what its transitions cost.

    Attributes:
        startup_s: the parts of the start, in seconds without waits, by name.
    """

    def __init__(self, context: RunContext, workers: AnyWorkers):
        self.startup_s: dict[str, float] = {}
        self._context = context
        self._events = context.events
        self._workers = workers
        self._state: events.RunState = "waiting"
        self._transitions = TransitionLog()
        self._first_step_at: float | None = None
        self._trains_since = 0.0  # by a clock that never steps
        self._waited_before_s = 0.0

    def begin(self) -> None:
        """Record that the run has started."""
        spec, plan = self._context.spec, self._context.spec.sizes.initial
        self._events.emit(
            events.RunStarted(
                name=plan.run_name,
                run_dir=spec.run_dir.location,
                strategy=plan.strategy,
                job=plan.job,
                world_size=plan.world_size,
                num_servers=plan.mesh.num_servers,
                steps=plan.steps,
                resumed_from_step=spec.resumed_from_step,
                source=None if spec.source is None else spec.source.location,
                evaluates=spec.config.evaluate is not None,
                notes=plan.notes,
            )
        )
        self.startup_s["driver_s"] = time.time() - spec.started_at

    def enter(self, state: events.RunState, **values: str) -> None:
        """Record that the run has come into ``state``; ``values``: other keys of its record."""
        if state == self._state:
            return
        self._state = state
        self._events.emit(events.StateChanged(state=state))
        self.record(state=state, **values)

    def record(self, **values: Any) -> None:
        """Set keys of the record of the run."""
        with contextlib.suppress(OSError, ValueError):  # a full disk, for example: the run goes on
            self._context.spec.run_dir.update_record(**values)

    def begin_training(self, event: events.FirstStepDone) -> None:
        """Record the first step of a generation, which ends the start of the run or a transition."""
        if self._first_step_at is None:
            self._first_step_at = event.time
            self._trains_since = time.monotonic()
            self._waited_before_s = sum(self._workers.waits_s.values())
            self.startup_s |= event.startup
        self.end_transition(event.generation, event.time)

    def begin_transition(self, transition: Transition) -> None:
        """Record what has ended a generation that another one follows."""
        self._transitions.begin(transition)

    def continue_with(self, plan: RecoveryPlan, *, step: int | None) -> None:
        """Record how the transition that has begun goes on: see :class:`Transition`."""
        self._transitions.continue_with(plan, step=step, num_workers=self._workers.plan.mesh.num_workers)

    def end_transition(self, generation: int, at: float) -> None:
        """Record that ``generation`` trains since ``at``, in seconds since the epoch, if a transition led to it."""
        self.enter("running")
        if (recovered := self._transitions.end(generation, at)) is not None:
            self._events.emit(recovered)
            metrics = {"recovery/seconds": recovered.seconds, "recovery/num_workers": float(recovered.num_workers)}
            self._events.emit(events.MetricsLogged(step=recovered.step, metrics=metrics))

    def summary(self, *, step_s: float) -> dict[str, Any]:
        """Return the transitions and the times for ``run.json``; ``step_s`` is the usual time of one step."""
        waits = self._workers.waits_s
        summary = self._transitions.summary() | {key: seconds for key, seconds in waits.items() if seconds}
        if self._first_step_at is not None:
            summary["startup_s"] = self._first_step_at - self._context.spec.started_at - self._waited_before_s
            summary["startup"] = self.startup_s
            elapsed_s = time.monotonic() - self._trains_since - (sum(waits.values()) - self._waited_before_s)
            summary["effective_time_pct"] = self._transitions.effective_time_pct(
                elapsed_s, step_s=step_s, now=time.time()
            )
        return summary


def worker_lost(end: GenerationEnd, rank: int, name: str, run_dir: RunDir, *, runs_script: bool) -> events.WorkerLost:
    """Return an event for the failure of ``rank``, called ``name``, from which the run recovers."""
    return _event(events.WorkerLost, end, rank, name, run_dir, step=_known(end.last_step, runs_script=runs_script))


def worker_failed(
    end: GenerationEnd, rank: int, name: str, run_dir: RunDir, *, last_step: int, runs_script: bool
) -> events.WorkerFailed:
    """Return an event for the failure of ``rank``, called ``name``, that ends the run.

    ``last_step``: the last step of the rank in its reports. Those that a dead worker has left may be of later steps
    than the driver knew of when it recorded the death.
    """
    raised = bool(end.outcomes.failure(rank).traceback)
    step = end.outcomes.by_rank[rank].step if raised else last_step
    failed = _event(events.WorkerFailed, end, rank, name, run_dir, step=_known(step, runs_script=runs_script))
    return failed if failed.log_tail or raised else replace(failed, log_tail=log_tail(run_dir.log_file(rank)))


def _known(step: int, *, runs_script: bool) -> int | None:
    """Return a step of the run; None if a script has reported none."""
    return None if runs_script and not step else step


def _event(kind: type[E], end: GenerationEnd, rank: int, name: str, run_dir: RunDir, *, step: int | None) -> E:
    failure = end.outcomes.failure(rank)
    return kind(
        rank=rank,
        display_name=name,
        step=step,
        reason=failure.message,
        traceback=failure.traceback,
        log=this_origin().log(run_dir, rank),
        log_tail=failure.log_tail,
        own_frames=failure.own_frames,
    )


POLL_S = 2.0
"""Ask this often whether a worker still writes its last checkpoint."""


class SavedCheckpoints:
    """Follows the reports on checkpoints, and looks for unreported ones.

    Attributes:
        newest: the last checkpoint that was saved, or that the run resumes from; None if there is none.
        step: its step; 0 if there is none.
        remote: the directory on a store that ``newest`` has to be fetched from; None if it is on disk.
    """

    def __init__(self, context: RunContext):
        spec, run_dir = context.spec, context.spec.run_dir
        self.newest = spec.checkpoint
        self.remote = (spec.source or run_dir).remote_checkpoints
        self.step = spec.resumed_from_step or 0
        self._context = context
        self._directory = run_dir.checkpoints
        self._is_remote = run_dir.remote is not None
        self._store = CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints)
        self._failed: dict[int, str] = {}  # by step: why

    def record(self, event: events.CheckpointSaved | events.CheckpointFailed) -> None:
        """Take note of a checkpoint that was saved or could not be."""
        if isinstance(event, events.CheckpointSaved):
            self._set_newest(path_of(self._directory, event.step), event.step)
        else:
            self._failed[event.step] = event.reason

    def find_newest(self) -> None:
        """Find the newest valid checkpoint, whose writer may have died before it could report it."""
        damaged: list[CheckpointError] = []
        warn = self._context.events.warn
        try:
            newest = self._store.find_newest(damaged.append)
        except StorageError as e:
            newest = None
            warn(f"the newest checkpoint cannot be looked up: {e}")
        for error in damaged:
            warn(f"checkpoint skipped: {error}")
        if newest is not None:
            self._set_newest(newest, int(read_manifest(newest)["step"]))

    def why_missing(self, step: int) -> str | None:
        """Return why there is no checkpoint of ``step``, as a predicate; None if there is one."""
        if self.step == step:
            return None
        path = path_of(self._directory, step)
        try:
            if not self._is_remote:
                read_manifest(path)  # its writer may have died before its report
            elif path.name not in self._store.list():
                raise CheckpointError(self._store.location(path.name), "it is not on the store")
        except (CheckpointError, StorageError) as e:
            reason = self._failed.get(step)
            return f"was not confirmed: {e}" if reason is None else f"could not be written: {reason}"
        return None

    def wait_for_last(self, gang: Members, ranks: Collection[int]) -> None:
        """Let ``ranks`` finish their checkpoints, for as long as bytes are being written, and report those that failed.

        Raises:
            GangError: Ray is dead.
            RayError: see :meth:`Gang.poll`.
        """
        config, stop = self._context.spec.config, self._context.stop
        grace_s = config.cluster.stop_grace_s
        writing: Mapping[int, PendingCheckpoint] = {}
        progressed_at = time.monotonic()
        while ranks:
            answers = gang.poll(BaseWorker.finish, POLL_S, ranks=ranks, timeout_s=POLL_S + grace_s)
            before, writing = writing, {rank: pending for rank, pending in answers.items() if pending is not None}
            ranks = writing.keys()
            key, limit_s = "recovery.hang_max_s", config.recovery.hang_max_s
            if stop.received is not None:
                key, limit_s = "cluster.stop_grace_s", grace_s
            elif writing != before:
                progressed_at = time.monotonic()
            if time.monotonic() - progressed_at > limit_s:
                for pending in writing.values():
                    event = events.CheckpointFailed(step=pending.step, reason=f"it was not written in time ({key})")
                    self._context.events.emit(event)
                    self.record(event)
                return
            self._context.lease.check()

    def _set_newest(self, path: Path, step: int) -> None:
        """Let the run's own checkpoint ``path`` be the newest one, in place of one of another run."""
        self.newest, self.step = path, step
        self.remote = self._context.spec.run_dir.remote_checkpoints
