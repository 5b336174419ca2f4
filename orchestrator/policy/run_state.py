"""The state of a run: what follows a generation, as one function of what happened in it, and the verdict. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.config.operation import RecoveryConfig
from orchestrator.config.text import first_few
from orchestrator.policy.failure import Outcomes
from orchestrator.policy.recovery import Failed, FailureRecord, RecoveryPlan, decide, plan_after_pause
from orchestrator.protocol.events import ONLY_OWN, EndReason, PauseReason
from orchestrator.protocol.messages import Phase

_DOING: Mapping[Phase, str] = {
    "start": "starting",
    "join": "waiting for the others",
    "connect": "connecting to the others",
    "build": "building the model",
    "train": "in a training step",
    "eval": "in a batch of an evaluation",
    "sample": "in Job.sample",
    "checkpoint": "saving a checkpoint",
    "callback": "in a callback, or in Job.predictions",
    "compile": "compiling the model",
    "end": "writing its last checkpoint",
}


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
        phases: what each rank does that has not ended.
    """

    outcomes: Outcomes
    last_step: int
    asked: EndReason | None = None
    asked_at: float = 0.0
    draining: tuple[int, ...] = ()
    stopped_ago_s: float | None = None
    phases: Mapping[int, Phase | None] = field(default_factory=dict)

    @property
    def held_up_by(self) -> str | None:
        """What has kept ranks from stopping in time; None if nothing has."""
        if (rank := self.outcomes.first_failed) is not None:
            return f"rank {rank} has failed: {self.outcomes.failure(rank).message}"
        if not self.phases:
            return None
        ranks = first_few([f"rank {rank}" for rank in sorted(self.phases)])
        phases = sorted({_DOING[phase or "start"] for phase in self.phases.values()})
        return f"{ranks} did not end within cluster.stop_grace_s, {' and '.join(phases)}"

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
class Continuing:
    """The workers change, and the next generation begins as the ``plan`` says.

    Attributes:
        state: the state of the run until it trains again.
    """

    state: Literal["recovering", "replacing", "growing"]
    plan: RecoveryPlan


NextState = Literal["done", "stopped", "yielding"] | Failed | Continuing
"""``done``: after all steps; ``stopped``: a stop was requested; ``yielding``: for a run that goes first."""


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
        if isinstance(decision, Failed):
            return "stopped" if end.asked == "stopped" else decision
        if end.stopped_ago_s is not None and (decision.sources is None or end.stopped_ago_s >= stop_grace_s):
            return "stopped"  # otherwise the survivors save what they hold
        return Continuing("recovering", decision)
    if end.paused == "growing":  # it may have saved nothing, so that a stop waits for it
        return Continuing("growing", plan_after_pause(survivors, (), world_size=world_size))
    if is_stopping and not end.outcomes.all_ended("done"):
        return "stopped"
    if end.paused == "yielded":
        return "yielding"
    if end.paused == "preempted":
        return Continuing("replacing", plan_after_pause(survivors, end.draining, world_size=world_size))
    return "done"


REFUSED = 2
"""The exit code of a run that could not begin because of what it asks for."""
RESULT_LOST = 3
"""The exit code of a run that has completed its steps without saving the result, or all of its records."""


@dataclass(frozen=True)
class Verdict:
    """How a run ended.

    Attributes:
        reason: why it ended; empty if it has done all its steps.
    """

    status: Literal["FINISHED", "PRUNED", "FAILED", "KILLED"]
    exit_code: int
    reason: str = ""


def completed(step: int, *, ended_early: str | None = None, checkpoint_missing: str | None) -> Verdict:
    """Return the verdict on a run that has done all its steps, the last of them ``step``, or has ended early.

    Args:
        ended_early: why there are no further steps; None if there were to be none.
        checkpoint_missing: why the last checkpoint is missing, as a predicate; None if it is there.
    """
    if checkpoint_missing is None:
        return Verdict("FINISHED", 0, "" if ended_early is None else f"ended early: {ended_early}")
    done = f"all {step} steps are done" if ended_early is None else f"{step} steps are done ({ended_early})"
    lost = f"{done}, but their result is lost: the checkpoint of step {step} {checkpoint_missing}"
    return Verdict("FAILED", RESULT_LOST, lost)


def pruned(step: int) -> Verdict:
    """Return the verdict on a run that a search has ended after ``step``, because others were better there."""
    return Verdict("PRUNED", 0, f"pruned at step {step}")


def failed(reason: str) -> Verdict:
    """Return the verdict on a run that could not go on because of ``reason``."""
    return Verdict("FAILED", 1, reason)


def refused(reason: str) -> Verdict:
    """Return the verdict on a run that has not begun because of ``reason``, and must be changed to do so."""
    return Verdict("FAILED", REFUSED, reason)


def stopped(
    signal_number: int,
    cause: str,
    *,
    at_step: int | None,
    trained: bool,
    checkpoint_missing: str | None = None,
    runs_script: bool = False,
    held_up_by: str | None = None,
    unsaved: Mapping[int, str] | None = None,
) -> Verdict:
    """Return the verdict on a run that was stopped by a signal.

    Args:
        cause: who sent it, in words.
        at_step: the step after which all ranks have stopped; None if they have not.
        trained: whether any step was done.
        checkpoint_missing: why there is no checkpoint of ``at_step``, as a predicate; None if there is one.
        runs_script: whether a script trains, which need not report steps and saves what it needs itself.
        held_up_by: what has kept the ranks from stopping, if they have not.
        unsaved: by rank, why a script may not have saved what it was to save.
    """
    if runs_script:
        when = f"at step {at_step}" if at_step else "while its script ran" if trained else "before its first report"
        if unsaved:
            rank, why = next(iter(unsaved.items()))
            when += f"; what rank {rank} was to save may be missing: {why}"
        else:
            when += f"; {ONLY_OWN}"
    elif at_step is not None:
        when = f"at step {at_step}" + (f"; its checkpoint {checkpoint_missing}" if checkpoint_missing else "")
    elif trained:
        when = "without a last checkpoint" + (f": {held_up_by}" if held_up_by else "")
    else:
        when = "before training began"
    return Verdict("KILLED", 128 + signal_number, f"stopped by {cause} {when}")
