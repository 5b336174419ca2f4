"""What it costs a run to go from one generation to the next: time, and steps that are made again. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.policy.recovery import RecoveryPlan
from orchestrator.protocol.events import Recovered


@dataclass(frozen=True, kw_only=True)
class Transition:
    """What was decided, since when (seconds since the epoch), how far training had come and where it goes on.

    ``planned``: why all paused; None: something had failed. ``num_workers_before``: their number in the generation
    before, ``num_workers`` in the next one.
    """

    began: float
    reached: int
    resumed_at: int
    decision: RecoveryPlan
    num_workers_before: int
    num_workers: int
    planned: str | None


class TransitionLog:
    """The regroupings of a run. The time of one ends with the first step after it."""

    def __init__(self) -> None:
        self._open: Transition | None = None
        self._done: list[Recovered] = []

    def begin(self, transition: Transition) -> Transition:
        """One that begins before the last has ended counts with it, as one, from the first failure on."""
        if (earlier := self._open) is not None:
            transition = Transition(
                began=earlier.began,
                reached=max(earlier.reached, transition.reached),
                resumed_at=transition.resumed_at,
                decision=transition.decision,
                num_workers_before=earlier.num_workers_before,
                num_workers=transition.num_workers,
                planned=transition.planned,
            )
        self._open = transition
        return transition

    def end(self, generation: int, time: float) -> Recovered | None:
        """The first step of ``generation`` is done; None: nothing had to be regrouped for it."""
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
        """Failures and preemptions apart; the list of times is of failures."""
        recovery_s = [r.seconds for r in self._done if r.planned is None]
        preemptions = sum(r.planned == "preempted" for r in self._done)
        summary: dict[str, Any] = {
            "restarts": len(recovery_s),
            "steps_lost": sum(r.steps_lost for r in self._done),
            "recovery_s": recovery_s,
        }
        if recovery_s:
            summary["recovery_s_max"] = max(recovery_s)
        if preemptions:
            summary["preemptions"] = preemptions
        return summary

    def effective_time_pct(self, elapsed_s: float, *, step_s: float) -> float:
        """How much of the time since the first step was not spent on regrouping and on steps that were made again."""
        lost_s = sum(r.seconds + r.steps_lost * step_s for r in self._done)
        return 100 * max(0.0, 1 - lost_s / max(elapsed_s, 1e-9))
