"""Which size a run has, and who sits where when that changes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.policy.recovery import RecoverableSteps, RecoveryPlan, newest_state


@dataclass(frozen=True)
class Sizes:
    """``plans``: those that a run may have, the smallest first; ``first``: the one that it begins with."""

    plans: tuple[Plan, ...]
    first: Plan

    @property
    def most(self) -> Plan:
        return self.plans[-1]

    @property
    def is_elastic(self) -> bool:
        return len(self.plans) > 1


@dataclass(frozen=True, kw_only=True)
class RankAssignment:
    """The workers of the next generation under ``plan``.

    ``before``: for each rank the one that its worker had; None: the worker is new. ``state_sources``: for each rank
    one of the old ranks that have its state; None: no rank has, the model is divided in another way.
    """

    plan: Plan
    before: tuple[int | None, ...]
    state_sources: tuple[int, ...] | None


def find_rank_assignment(
    plan: Plan, sizes: Sizes, alive: Collection[int], *, ready: int, saved: bool = False
) -> RankAssignment | None:
    """The largest one for the ranks of ``plan`` that are ``alive`` and so many new workers that are ``ready``; rather
    a smaller one in which everybody keeps what it has, unless all of it is ``saved``.

    None: there are too few of them for any size.
    """
    larger_first = tuple(reversed(sizes.plans))
    in_place = [_assign_ranks(plan.mesh, other, alive) for other in larger_first]
    anew = [_assign_anywhere(other, alive) for other in larger_first]
    possible = [s for s in (*in_place, *anew) if s.before.count(None) <= ready]
    if saved:
        possible.sort(key=lambda s: -s.plan.world_size)
    return next((s for s in possible if s.state_sources is not None or saved), next(iter(possible), None))


def _assign_ranks(old: Mesh, plan: Plan, alive: Collection[int]) -> RankAssignment:
    """Everybody keeps the stages that they have, if the model stays divided as it was."""
    new = plan.mesh
    if new.pipeline_parallel_size != old.pipeline_parallel_size:
        return _assign_anywhere(plan, alive)
    of_stage = [[r for r in sorted(alive) if old.pp_rank(r) == stage] for stage in range(old.pipeline_parallel_size)]
    before: list[int | None] = []
    state_sources: list[int] = []
    for rank in range(new.world_size):
        stage, dp_rank = new.pp_rank(rank), new.dp_rank(rank)
        before.append(of_stage[stage][dp_rank] if dp_rank < len(of_stage[stage]) else None)
        taken = before[-1]
        state_sources.append(old.global_rank(dp_rank=0, pp_rank=stage) if taken is None else taken)
    return RankAssignment(plan=plan, before=tuple(before), state_sources=tuple(state_sources))


def _assign_anywhere(plan: Plan, alive: Collection[int]) -> RankAssignment:
    left: Sequence[int] = sorted(alive)
    before = tuple(left[rank] if rank < len(left) else None for rank in range(plan.world_size))
    return RankAssignment(plan=plan, before=before, state_sources=None)


def reassigned(
    decision: RecoveryPlan, rank_assignment: RankAssignment, recoverable_steps: Mapping[int, RecoverableSteps]
) -> RecoveryPlan:
    """``decision`` by the ranks of a new seating; ``recoverable_steps``: what the workers have, by the old ones."""
    new = tuple(rank for rank, before in enumerate(rank_assignment.before) if before is None)
    step, sources = 0, None
    if rank_assignment.state_sources is not None:
        seated = {rank: of_rank for rank, of_rank in recoverable_steps.items() if rank in rank_assignment.before}
        step, sources = newest_state(seated, rank_assignment.state_sources)
    if sources is not None:
        sources = tuple(rank_assignment.before.index(source) for source in sources)
    return RecoveryPlan(lost=new, sources=sources, step=step, pause_s=decision.pause_s)
