"""The cost of each transition from one generation to the next: time, and repeated steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from orchestrator.policy.recovery import RecoveryPlan
from orchestrator.protocol.events import PauseReason, Recovered


@dataclass(frozen=True, kw_only=True)
class Transition:
    """The change from one generation to the next.

    ``began``: seconds since the epoch.
    ``reached``: the last step that any rank completed before. ``resumed_at``: the step that training continues from.
    ``planned``: why the run paused; None after a failure.
    """

    began: float
    reached: int
    resumed_at: int
    decision: RecoveryPlan
    num_workers_before: int
    num_workers: int
    planned: PauseReason | None


class TransitionLog:
    """The transitions of a run. Each ends when the next step completes."""

    def __init__(self) -> None:
        self._open: Transition | None = None
        self._done: list[Recovered] = []

    def begin(self, transition: Transition) -> Transition:
        """Record the start of a transition and return it.

        One that begins before the last has ended is merged into it: both count as one, from the first failure on.
        """
        if (earlier := self._open) is not None:
            transition = replace(
                transition,
                began=earlier.began,
                reached=max(earlier.reached, transition.reached),
                num_workers_before=earlier.num_workers_before,
            )
        self._open = transition
        return transition

    def end(self, generation: int, time: float) -> Recovered | None:
        """Record that the first step of ``generation`` completed at ``time``; None if no transition led to it."""
        transition, self._open = self._open, None
        if transition is None:
            return None
        recovered = Recovered(
            generation=generation,
            step=transition.resumed_at,
            steps_lost=max(0, transition.reached - transition.resumed_at),
            replaced=transition.decision.lost,
            in_place=transition.decision.sources is not None,
            seconds=time - transition.began,
            planned=transition.planned,
            num_workers=transition.num_workers,
            num_workers_before=transition.num_workers_before,
        )
        self._done.append(recovered)
        return recovered

    def summary(self) -> dict[str, Any]:
        """Return the totals for ``run.json``: recoveries from failures, with their times, apart from preemptions."""
        recovery_s = [r.seconds for r in self._done if r.planned is None]
        preemptions, yields = (sum(r.planned == reason for r in self._done) for reason in ("preempted", "yielded"))
        summary: dict[str, Any] = {
            "restarts": len(recovery_s),
            "steps_lost": sum(r.steps_lost for r in self._done),
            "recovery_s": recovery_s,
        }
        if recovery_s:
            summary["recovery_s_max"] = max(recovery_s)
        if preemptions:
            summary["preemptions"] = preemptions
        if yields:
            summary["yields"] = yields
        return summary

    def effective_time_pct(self, elapsed_s: float, *, step_s: float) -> float:
        """Return the share of the time since the first step, in percent, without transitions and repeated steps.

        ``step_s`` is the usual time of one step.
        """
        lost_s = sum(r.seconds + r.steps_lost * step_s for r in self._done)
        return 100 * max(0.0, 1 - lost_s / max(elapsed_s, 1e-9))
