"""The state of a run: what follows a generation, as one function of what happened in it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from orchestrator.config.schema import RecoveryConfig
from orchestrator.policy.failure import Outcomes
from orchestrator.policy.recovery import FailureRecord, GiveUp, RecoveryPlan, decide, plan_after_pause
from orchestrator.protocol.events import EndReason, PauseReason, RunState


@dataclass(frozen=True, kw_only=True)
class GenerationEnd:
    """What happened in a generation.

    Attributes:
        outcomes: how the part of each rank ended, as far as it is known.
        last_step: the last step that any rank has completed.
        asked: why the ranks were asked to end it; None if they were not.
        asked_at: when, in seconds since the epoch.
        draining: the ranks whose workers must leave.
        stopped_ago_s: the seconds since the run was last asked to stop; None if it was not.
    """

    outcomes: Outcomes
    last_step: int
    asked: EndReason | None = None
    asked_at: float = 0.0
    draining: tuple[int, ...] = ()
    stopped_ago_s: float | None = None

    @property
    def failure(self) -> FailureRecord | None:
        """The failure that caused the others; None if no rank has failed."""
        if (rank := self.outcomes.first_failed) is None:
            return None
        failure = self.outcomes.failure(rank)
        return FailureRecord(
            rank=rank,
            step=self.last_step,
            message=failure.message,
            raised=bool(failure.traceback),
            final=failure.final,
        )

    @property
    def paused(self) -> PauseReason | None:
        """Why all ranks have stopped after the same step, for the run to go on with other workers; None otherwise."""
        asked = None if self.asked == "stopped" else self.asked
        return asked if self.outcomes.all_ended("stopped") else None


@dataclass(frozen=True)
class Done:
    """The run has done all of its steps."""


@dataclass(frozen=True)
class Stopped:
    """The run ends because a stop was requested."""


@dataclass(frozen=True)
class Failed:
    """The run ends because ``rank`` has failed.

    Attributes:
        why: why it does not recover; empty if the failure explains it.
    """

    rank: int
    why: str


@dataclass(frozen=True)
class Yielding:
    """All workers are released for another run, and the run waits for its turn."""

    name: ClassVar[RunState] = "yielding"


@dataclass(frozen=True)
class Recovering:
    """The run goes on after the failure of ``rank``."""

    rank: int
    plan: RecoveryPlan
    name: ClassVar[RunState] = "recovering"


@dataclass(frozen=True)
class Replacing:
    """The run goes on with new workers in the place of those that must leave."""

    plan: RecoveryPlan
    name: ClassVar[RunState] = "replacing"


@dataclass(frozen=True)
class Growing:
    """The run goes on with more workers."""

    plan: RecoveryPlan
    name: ClassVar[RunState] = "growing"


GoingOn = Recovering | Replacing | Growing
"""The states in which the workers change, and the next generation begins as the ``plan`` says."""
NextState = Done | Stopped | Failed | Yielding | GoingOn


def what_follows(
    end: GenerationEnd,
    earlier_failures: Sequence[FailureRecord],
    *,
    recovery: RecoveryConfig,
    stop_grace_s: float,
    always_restarts: bool = False,
) -> NextState:
    """Return the state of a run after a generation.

    Args:
        end: what happened in the generation.
        earlier_failures: those that ended earlier generations, in order.
        recovery: the limits to recoveries.
        stop_grace_s: how long after the request to stop a recovery may begin, which then only saves.
        always_restarts: see :func:`decide`.
    """
    is_stopping = end.stopped_ago_s is not None
    survivors, world_size = end.outcomes.survivors(), end.outcomes.world_size
    if (failure := end.failure) is not None:
        failures = [*earlier_failures, failure]
        decision = decide(failures, survivors, world_size=world_size, config=recovery, always_restarts=always_restarts)
        if isinstance(decision, GiveUp):
            return Stopped() if end.asked == "stopped" else Failed(failure.rank, decision.why)
        if end.stopped_ago_s is not None and (decision.sources is None or end.stopped_ago_s >= stop_grace_s):
            return Stopped()  # otherwise the survivors save what they hold
        return Recovering(failure.rank, decision)
    if end.paused == "growing":  # it may have saved nothing, so that a stop waits for it
        return Growing(plan_after_pause(survivors, (), world_size=world_size))
    if is_stopping and not end.outcomes.all_ended("done"):
        return Stopped()
    if end.paused == "yielded":
        return Yielding()
    if end.paused == "preempted":
        return Replacing(plan_after_pause(survivors, end.draining, world_size=world_size))
    return Done()
