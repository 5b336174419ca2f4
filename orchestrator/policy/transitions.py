"""The cost of each transition from one generation to the next: time, and repeated steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from orchestrator.policy.recovery import RecoveryPlan
from orchestrator.protocol.events import PauseReason, Recovered


@dataclass(frozen=True, kw_only=True)
class Transition:
    """What ended the training of a generation, and how the next one begins.

    Attributes:
        began: seconds since the epoch.
        reached: the last step that any rank completed.
        num_workers_before: the workers of the generation that ended.
        planned: why the run paused; None after a failure.
        plan: how the next generation begins; None until that is known.
        step: the step that training continues from; None if a script decides that.
        num_workers: the workers of the next generation.
    """

    began: float
    reached: int
    num_workers_before: int
    planned: PauseReason | None
    plan: RecoveryPlan | None = None
    step: int | None = None
    num_workers: int = 0


class TransitionLog:
    """The transitions of a run. Each ends when the next step completes, or the training if no step is left."""

    def __init__(self) -> None:
        self._open: Transition | None = None
        self._done: list[Recovered] = []

    def begin(self, transition: Transition) -> None:
        """Record the start of a transition.

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

    def continue_with(self, plan: RecoveryPlan, *, step: int | None, num_workers: int) -> None:
        """Record how the transition that has begun goes on; arguments as of :class:`Transition`."""
        assert self._open is not None
        self._open = replace(self._open, plan=plan, step=step, num_workers=num_workers)

    def end(self, generation: int, time: float) -> Recovered | None:
        """Record that ``generation`` trains since ``time``; None if no transition led to it."""
        ended, self._open = self._open, None
        if ended is None or ended.plan is None:
            return None
        recovered = Recovered(
            generation=generation,
            step=ended.reached if ended.step is None else ended.step,
            steps_lost=None if ended.step is None else max(0, ended.reached - ended.step),
            replaced=ended.plan.lost,
            in_place=ended.plan.sources is not None,
            seconds=max(0.0, time - ended.began),  # the clock may have been set back
            planned=ended.planned,
            num_workers=ended.num_workers,
            num_workers_before=ended.num_workers_before,
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
        if self._open is not None:
            lost_s += max(0.0, now - self._open.began)
        return 100 * max(0.0, 1 - lost_s / max(elapsed_s, 1e-9))
