"""What to do after a failure, from the failures so far and the state that survives; and what it costs. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.config.operation import RecoveryConfig
from orchestrator.protocol.events import PauseReason, Recovered
from orchestrator.protocol.messages import ANY_RANK, PENDING, RecoverableSteps

GENERATIONS_WITHOUT_PROGRESS = 3
"""Give up after this many failures in a row without a completed step in between."""
MAX_BACKOFF_S = 60.0
_OF_THE_PROCESS = re.compile(r"\b0x[0-9a-fA-F]+|\bpid\W*\d+")
"""What differs in the text of an error when another process raises it again."""


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """The end of a generation that failed.

    Attributes:
        rank: the rank that failed first.
        step: the last step that any rank completed.
        raised: the code raised an exception, which it may well raise again.
        final: another attempt would end in the same way.
    """

    rank: int
    step: int
    message: str
    raised: bool
    final: bool


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """How the next generation starts.

    Attributes:
        lost: the ranks that get a new worker, after ``pause_s`` seconds.
        sources: for each rank the survivor that holds its state after ``step``; None if all ranks load the newest
            checkpoint instead, or start from the beginning.
    """

    lost: tuple[int, ...]
    sources: tuple[int, ...] | None
    step: int
    pause_s: float


@dataclass(frozen=True)
class Failed:
    """The run ends because ``rank`` has failed.

    Attributes:
        why: why it does not recover; empty if the failure explains it.
    """

    rank: int
    why: str = ""


def decide(
    failures: Sequence[FailureRecord],
    survivors: Mapping[int, RecoverableSteps],
    *,
    world_size: int,
    config: RecoveryConfig,
    always_restarts: bool = False,
) -> RecoveryPlan | Failed:
    """Decide what to do about the last of ``failures``.

    Args:
        failures: all failures of the run, in order.
        survivors: the state of each surviving rank.
        always_restarts: whether the run restarts ``recovery.max_failures`` times, whatever fails: a script need not say
            how far it has come.
    """
    last = failures[-1]
    if config.max_failures == 0 or last.final:
        return Failed(last.rank)
    if not always_restarts and (why := _why_hopeless(failures)) is not None:
        return Failed(last.rank, why)
    if len(failures) > config.max_failures:
        return Failed(last.rank, f"{len(failures)} failures, recovery.max_failures={config.max_failures}")
    repeats = _failures_without_progress(failures)
    if not always_restarts and repeats + 1 >= GENERATIONS_WITHOUT_PROGRESS:
        return Failed(last.rank, f"{GENERATIONS_WITHOUT_PROGRESS} failures in a row without progress")
    pause_s = min(MAX_BACKOFF_S, config.backoff_s * 2 ** (repeats - 1)) if repeats else 0.0
    step, sources = newest_state(survivors, range(world_size))
    lost = tuple(rank for rank in range(world_size) if rank not in survivors)
    return RecoveryPlan(lost=lost, sources=sources, step=step, pause_s=pause_s)


def plan_after_pause(
    recoverable_steps: Mapping[int, RecoverableSteps], draining: Sequence[int], *, world_size: int
) -> RecoveryPlan:
    """Return the plan after a planned pause, in which the ``draining`` ranks are replaced."""
    staying = {rank: states for rank, states in recoverable_steps.items() if rank not in draining}
    step, sources = newest_state(staying, range(world_size))
    return RecoveryPlan(lost=tuple(draining), sources=sources, step=step, pause_s=0.0)


def newest_state(survivors: Mapping[int, RecoverableSteps], ranks: Sequence[int]) -> tuple[int, tuple[int, ...] | None]:
    """Find the last step after which the survivors together hold the state of every rank in ``ranks``.

    Returns:
        The step, and for each rank the survivor to take its state from: the rank itself if it holds its own.
        ``(0, None)`` if there is no such step.
    """
    steps = {
        step
        for states in survivors.values()
        for of_rank in states.values()
        for step in of_rank
        if step not in states.get(PENDING, ())
    }
    for step in sorted(steps, reverse=True):
        of_any = min((s for s, states in survivors.items() if step in states.get(ANY_RANK, ())), default=None)
        sources = [_holder(survivors, rank, step, of_any) for rank in ranks]
        found = [source for source in sources if source is not None]
        if len(found) == len(ranks):
            return step, tuple(found)
    return 0, None


def _holder(survivors: Mapping[int, RecoverableSteps], rank: int, step: int, of_any: int | None) -> int | None:
    """Return the survivor to take the state of ``rank`` from. ``of_any`` holds the state of any rank."""
    own = survivors.get(rank, {})
    if step in own.get(rank, ()) or step in own.get(ANY_RANK, ()):
        return rank
    if of_any is not None:
        return of_any
    return min((survivor for survivor, states in survivors.items() if step in states.get(rank, ())), default=None)


def _why_hopeless(failures: Sequence[FailureRecord]) -> str | None:
    """Return why the last failure will most likely come again, empty if it explains that; None if it may not."""
    last = failures[-1]
    if last.raised and len(failures) == 1 and last.step == 0:
        return ""  # the job has never completed a step: a bug in its code is more likely than a bad machine
    if len(failures) > 1 and _is_repeated(last, failures[-2]):
        return "the same error occurred twice at the same step"
    return None


def _is_repeated(one: FailureRecord, other: FailureRecord) -> bool:
    first, second = (_OF_THE_PROCESS.sub("", failure.message) for failure in (one, other))
    return one.raised and other.raised and (one.step, first) == (other.step, second)


def _failures_without_progress(failures: Sequence[FailureRecord]) -> int:
    """How many of the last failures happened no later in training than the failure before them."""
    number = 0
    for before, after in zip(reversed(failures[:-1]), reversed(failures), strict=False):
        if after.step > before.step:
            break
        number += 1
    return number


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
