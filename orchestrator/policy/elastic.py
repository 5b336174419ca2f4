"""The sizes that an elastic run may have, and which worker gets which rank when its size changes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.policy.recovery import RecoveryPlan, newest_state
from orchestrator.protocol.messages import RecoverableSteps


@dataclass(frozen=True)
class Sizes:
    """The plans that a run may have.

    ``plans``: in order of size, the smallest first. ``initial``: the plan that the run starts with.
    """

    plans: tuple[Plan, ...]
    initial: Plan

    @property
    def largest(self) -> Plan:
        """The largest plan."""
        return self.plans[-1]

    @property
    def max_processes(self) -> int:
        """The number of ranks and spares of the largest plan."""
        return self.largest.world_size + self.largest.spares

    @property
    def is_elastic(self) -> bool:
        """Whether the run may change its size."""
        return len(self.plans) > 1


@dataclass(frozen=True, kw_only=True)
class RankAssignment:
    """The worker of each rank of ``plan`` in the next generation.

    ``before``: for each rank the one that its worker had before; None for a new worker.
    ``state_sources``: for each rank an old rank with the same state; None if ``plan`` divides the model in another
    way, so that no old rank has it.
    """

    plan: Plan
    before: tuple[int | None, ...]
    state_sources: tuple[int, ...] | None


def find_rank_assignment(
    plan: Plan, sizes: Sizes, alive: Collection[int], *, ready: int, saved: bool = False
) -> RankAssignment | None:
    """Find the largest size for the workers that there are.

    A size in which all workers keep their state is preferred to a larger one in which they do not, unless ``saved``.

    Args:
        plan: the present plan.
        sizes: the plans to choose from.
        alive: the ranks of ``plan`` whose workers continue.
        ready: the number of new workers that could take a rank at once.
        saved: a checkpoint holds all of the state.

    Returns:
        None if there are too few workers for the smallest size.
    """
    larger_first = tuple(reversed(sizes.plans))
    in_place = [_assign_in_place(plan.mesh, other, alive) for other in larger_first]
    from_checkpoint = [_assign_in_order(other, alive) for other in larger_first]
    possible = [a for a in (*in_place, *from_checkpoint) if a.before.count(None) <= ready]
    if saved:
        possible.sort(key=lambda a: -a.plan.world_size)
    return next((a for a in possible if a.state_sources is not None or saved), next(iter(possible), None))


def reassigned(
    decision: RecoveryPlan, assignment: RankAssignment, recoverable_steps: Mapping[int, RecoverableSteps]
) -> RecoveryPlan:
    """Return ``decision`` for the ranks of ``assignment``; the keys of ``recoverable_steps`` are the old ranks."""
    before = assignment.before
    step, sources = 0, None
    if assignment.state_sources is not None:
        staying = {rank: states for rank, states in recoverable_steps.items() if rank in before}
        step, sources = newest_state(staying, assignment.state_sources)
    if sources is not None:
        sources = tuple(before.index(source) for source in sources)
    new = tuple(rank for rank, old in enumerate(before) if old is None)
    return RecoveryPlan(lost=new, sources=sources, step=step, pause_s=decision.pause_s)


def _assign_in_place(old: Mesh, plan: Plan, alive: Collection[int]) -> RankAssignment:
    """Let every worker keep its stage, if ``plan`` divides the model as before."""
    new = plan.mesh
    if new.pipeline_parallel_size != old.pipeline_parallel_size:
        return _assign_in_order(plan, alive)
    of_stage = [[r for r in sorted(alive) if old.pp_rank(r) == stage] for stage in range(old.pipeline_parallel_size)]
    before: list[int | None] = []
    state_sources: list[int] = []
    for rank in range(new.world_size):
        stage, dp_rank = new.pp_rank(rank), new.dp_rank(rank)
        own = of_stage[stage][dp_rank] if dp_rank < len(of_stage[stage]) else None
        before.append(own)
        state_sources.append(old.global_rank(dp_rank=0, pp_rank=stage) if own is None else own)
    return RankAssignment(plan=plan, before=tuple(before), state_sources=tuple(state_sources))


def _assign_in_order(plan: Plan, alive: Collection[int]) -> RankAssignment:
    """Give the first ranks to the workers that are alive, and the others to new ones; all load a checkpoint."""
    old: Sequence[int] = sorted(alive)
    before = tuple(old[rank] if rank < len(old) else None for rank in range(plan.world_size))
    return RankAssignment(plan=plan, before=before, state_sources=None)
