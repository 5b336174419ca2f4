"""Records how a run goes: its state, its transitions from generation to generation, its times."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any, TypeVar

from orchestrator.driver.process.origin import this_origin
from orchestrator.driver.process.run_context import RunContext
from orchestrator.driver.run.run_workers import RunWorkers
from orchestrator.policy.recovery import RecoveryPlan
from orchestrator.policy.run_state import GenerationEnd
from orchestrator.policy.transitions import Transition, TransitionLog
from orchestrator.protocol.events import (
    FirstStepDone,
    MetricsLogged,
    RunStarted,
    RunState,
    StateChanged,
    WorkerFailed,
    WorkerFailure,
    WorkerLost,
)
from orchestrator.records.rank_log import log_tail
from orchestrator.records.run_dir import RunDir

E = TypeVar("E", bound=WorkerFailure)


class RunRecorder:
    """Records the state of a run and what its transitions cost.

    Attributes:
        startup_s: the parts of the start, in seconds without waits, by name.
    """

    def __init__(self, context: RunContext, workers: RunWorkers):
        self.startup_s: dict[str, float] = {}
        self._context = context
        self._events = context.events
        self._workers = workers
        self._state: RunState = "waiting"
        self._transitions = TransitionLog()
        self._first_step_at: float | None = None
        self._trains_since = 0.0  # by a clock that never steps
        self._waited_before_s = 0.0

    def begin(self) -> None:
        """Record that the run has started."""
        spec, plan = self._context.spec, self._context.spec.sizes.initial
        self._events.emit(
            RunStarted(
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

    def enter(self, state: RunState, **values: str) -> None:
        """Record that the run has come into ``state``; ``values``: other keys of its record."""
        if state == self._state:
            return
        self._state = state
        self._events.emit(StateChanged(state=state))
        self.record(state=state, **values)

    def record(self, **values: Any) -> None:
        """Set keys of the record of the run."""
        with contextlib.suppress(OSError, ValueError):  # a full disk, for example: the run goes on
            self._context.spec.run_dir.update_record(**values)

    def begin_training(self, event: FirstStepDone) -> None:
        """Record the first step of a generation, which ends the start of the run or a transition."""
        if self._first_step_at is None:
            self._first_step_at = event.time
            self._trains_since = time.monotonic()
            self._waited_before_s = self._workers.waited_s
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
            self._events.emit(MetricsLogged(step=recovered.step, metrics=metrics))

    def summary(self, *, step_s: float) -> dict[str, Any]:
        """Return the transitions and the times for ``run.json``; ``step_s`` is the usual time of one step."""
        workers = self._workers
        waits = {"queue_s": workers.queue.waited_s, "waited_s": workers.gang.waited_s}
        summary = self._transitions.summary() | {key: seconds for key, seconds in waits.items() if seconds}
        if self._first_step_at is not None:
            summary["startup_s"] = self._first_step_at - self._context.spec.started_at - self._waited_before_s
            summary["startup"] = self.startup_s
            elapsed_s = time.monotonic() - self._trains_since - (workers.waited_s - self._waited_before_s)
            summary["effective_time_pct"] = self._transitions.effective_time_pct(
                elapsed_s, step_s=step_s, now=time.time()
            )
        return summary


def worker_lost(end: GenerationEnd, rank: int, name: str, run_dir: RunDir) -> WorkerLost:
    """Return an event for the failure of ``rank``, called ``name``, from which the run recovers."""
    return _event(WorkerLost, end, rank, name, run_dir, step=end.last_step)


def worker_failed(end: GenerationEnd, rank: int, name: str, run_dir: RunDir, *, last_step: int) -> WorkerFailed:
    """Return an event for the failure of ``rank``, called ``name``, that ends the run.

    ``last_step``: the last step of the rank in its reports. Those that a dead worker has left may be of later steps
    than the driver knew of when it recorded the death.
    """
    raised = bool(end.outcomes.failure(rank).traceback)
    step = end.outcomes.by_rank[rank].step if raised else last_step
    failed = _event(WorkerFailed, end, rank, name, run_dir, step=step)
    return failed if failed.log_tail or raised else replace(failed, log_tail=log_tail(run_dir.log_file(rank)))


def _event(kind: type[E], end: GenerationEnd, rank: int, name: str, run_dir: RunDir, *, step: int) -> E:
    failure = end.outcomes.failure(rank)
    return kind(
        rank=rank,
        display_name=name,
        step=step,
        reason=failure.message,
        traceback=failure.traceback,
        log=this_origin().log(run_dir, rank),
        log_tail=failure.log_tail,
    )
