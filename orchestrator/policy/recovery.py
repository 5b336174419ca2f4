"""What to do when a generation fails. Pure: from the failures so far and from who is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.config.schema import RecoveryConfig

GENERATIONS_WITHOUT_PROGRESS = 3
MOST_PAUSE_S = 60.0

RecoverableSteps = Mapping[int, tuple[int, ...]]
"""The ranks whose state a worker has, and after which steps."""


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """The end of a generation that failed.

    ``step``: the last one that any rank had completed. ``raised``: by an exception, which the same code may well raise
    again. ``final``: trying again would end the same.
    """

    rank: int
    step: int
    message: str
    raised: bool
    final: bool


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """The next generation: ``lost`` ranks get new workers, after ``pause_s``.

    ``sources``: for each rank the survivor that holds its state after ``step``; None: all are built anew, from the
    newest checkpoint.
    """

    lost: tuple[int, ...]
    sources: tuple[int, ...] | None
    step: int
    pause_s: float


@dataclass(frozen=True)
class GiveUp:
    """``why`` is empty where the failure speaks for itself."""

    why: str = ""


def decide(
    failures: Sequence[FailureRecord],
    survivors: Mapping[int, RecoverableSteps],
    *,
    world_size: int,
    config: RecoveryConfig,
) -> RecoveryPlan | GiveUp:
    """How the run goes on after the last of ``failures``; ``survivors``: the ranks that can, and what they hold."""
    last = failures[-1]
    if config.max_failures == 0 or last.final:
        return GiveUp()
    if last.raised and len(failures) == 1 and last.step == 0:
        return GiveUp()  # the job has never done a step: its code is at fault, not the machine
    if len(failures) > 1 and _same(last, failures[-2]):
        return GiveUp("the same error at the same step as before: no accident")
    if len(failures) > config.max_failures:
        return GiveUp(f"{len(failures)} failures, recovery.max_failures={config.max_failures}")
    standing = _standing(failures)
    if standing + 1 >= GENERATIONS_WITHOUT_PROGRESS:
        return GiveUp(f"{GENERATIONS_WITHOUT_PROGRESS} times without progress in between")
    pause_s = min(MOST_PAUSE_S, config.backoff_s * 2 ** (standing - 1)) if standing else 0.0
    step, sources = newest_state(survivors, range(world_size))
    lost = tuple(rank for rank in range(world_size) if rank not in survivors)
    return RecoveryPlan(lost=lost, sources=sources, step=step, pause_s=pause_s)


def plan_after_pause(
    recoverable_steps: Mapping[int, RecoverableSteps], leaving: Sequence[int], *, world_size: int
) -> RecoveryPlan:
    """The plan after a planned pause, without the ranks that are ``leaving``."""
    staying = {rank: of_rank for rank, of_rank in recoverable_steps.items() if rank not in leaving}
    step, sources = newest_state(staying, range(world_size))
    return RecoveryPlan(lost=tuple(leaving), sources=sources, step=step, pause_s=0.0)


def newest_state(survivors: Mapping[int, RecoverableSteps], ranks: Sequence[int]) -> tuple[int, tuple[int, ...] | None]:
    """The last step after which the survivors together hold the states of all ``ranks``, and for each who holds it:
    itself, if it does. None: there is no such step."""
    steps = {
        step for recoverable_steps in survivors.values() for of_rank in recoverable_steps.values() for step in of_rank
    }
    for step in sorted(steps, reverse=True):
        sources = [_holder(survivors, rank, step) for rank in ranks]
        found = [source for source in sources if source is not None]
        if len(found) == len(ranks):
            return step, tuple(found)
    return 0, None


def _holder(survivors: Mapping[int, RecoverableSteps], rank: int, step: int) -> int | None:
    holders = [
        other for other, recoverable_steps in sorted(survivors.items()) if step in recoverable_steps.get(rank, ())
    ]
    return rank if rank in holders else next(iter(holders), None)


def _same(one: FailureRecord, other: FailureRecord) -> bool:
    return one.raised and other.raised and (one.step, one.message) == (other.step, other.message)


def _standing(failures: Sequence[FailureRecord]) -> int:
    """How many of the last setbacks came without progress after the one before."""
    number = 0
    for before, after in zip(reversed(failures[:-1]), reversed(failures), strict=False):
        if after.step > before.step:
            break
        number += 1
    return number
