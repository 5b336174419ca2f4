"""The cost of each transition from one generation to the next: time, and repeated steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from orchestrator.policy.recovery import RecoveryPlan
from orchestrator.protocol.events import PauseReason, Recovered


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """What ended the training of a generation.

    Attributes:
        began: seconds since the epoch.
        reached: the last step that any rank completed.
        num_workers: the workers of the generation that ended.
        planned: why the run paused; None after a failure.
    """

    began: float
    reached: int
    num_workers: int
    planned: PauseReason | None


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """How the next generation begins.

    Attributes:
        step: the step that training continues from; None if a script decides that.
    """

    step: int | None
    decision: RecoveryPlan
    num_workers: int


class TransitionLog:
    """The transitions of a run. Each ends when the next step completes, or the training if no step is left."""

    def __init__(self) -> None:
        self._interruption: Interruption | None = None
        self._continuation: Continuation | None = None
        self._done: list[Recovered] = []

    def begin(self, interruption: Interruption) -> None:
        """Record the start of a transition.

        One that begins before the last has ended is merged into it: both count as one, from the first failure on.
        """
        if (earlier := self._interruption) is not None:
            interruption = replace(
                interruption,
                began=earlier.began,
                reached=max(earlier.reached, interruption.reached),
                num_workers=earlier.num_workers,
            )
        self._interruption = interruption

    def continue_with(self, continuation: Continuation) -> None:
        """Record how the transition that has begun goes on."""
        self._continuation = continuation

    def end(self, generation: int, time: float) -> Recovered | None:
        """Record that ``generation`` trains since ``time``; None if no transition led to it."""
        before, after = self._interruption, self._continuation
        self._interruption = self._continuation = None
        if before is None or after is None:
            return None
        recovered = Recovered(
            generation=generation,
            step=before.reached if after.step is None else after.step,
            steps_lost=None if after.step is None else max(0, before.reached - after.step),
            replaced=after.decision.lost,
            in_place=after.decision.sources is not None,
            seconds=max(0.0, time - before.began),  # the clock may have been set back
            planned=before.planned,
            num_workers=after.num_workers,
            num_workers_before=before.num_workers,
        )
        self._done.append(recovered)
        return recovered

    def summary(self) -> dict[str, Any]:
        """Return the totals for ``run.json``: recoveries from failures, with their times, apart from preemptions."""
        recovery_s = [r.seconds for r in self._done if r.planned is None]
        preemptions, yields = (sum(r.planned == reason for r in self._done) for reason in ("preempted", "yielded"))
        summary: dict[str, Any] = {
            "restarts": len(recovery_s),
            "steps_lost": sum(r.steps_lost or 0 for r in self._done),
            "recovery_s": recovery_s,
        }
        if recovery_s:
            summary["recovery_s_max"] = max(recovery_s)
        if preemptions:
            summary["preemptions"] = preemptions
        if yields:
            summary["yields"] = yields
        return summary

    def effective_time_pct(self, elapsed_s: float, *, step_s: float, now: float) -> float:
        """Return the share of the time since the first step, in percent, without transitions and repeated steps.

        A transition that has not ended counts up to ``now``, in seconds since the epoch. ``step_s`` is the usual time
        of one step.
        """
        lost_s = sum(r.seconds + (r.steps_lost or 0) * step_s for r in self._done)
        if self._interruption is not None:
            lost_s += max(0.0, now - self._interruption.began)
        return 100 * max(0.0, 1 - lost_s / max(elapsed_s, 1e-9))
