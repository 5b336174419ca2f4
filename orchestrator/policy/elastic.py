"""The sizes that an elastic run may have, and the ranks of its workers when the size changes. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.planning.mesh import Coords, Mesh
from orchestrator.planning.plan import Plan
from orchestrator.policy.recovery import RecoveryPlan, newest_state
from orchestrator.protocol.messages import RecoverableSteps


class Sizes:
    """The sizes that a run may have. The plan of a size is made when it is first needed.

    Attributes:
        meshes: the mesh of each size, the smallest first.
        initial: the plan that the run is to start with.
        cpus_of_data: the CPUs that have to be left beside the workers of each size.
    """

    def __init__(
        self,
        meshes: Sequence[Mesh],
        make_plan: Callable[[Mesh], Plan],
        *,
        initial: Mesh,
        find_rescues: Callable[[], Sequence[Mesh]] = tuple,
        cpus_of_data: float = 0.0,
    ):
        self.cpus_of_data = cpus_of_data
        self.meshes = tuple(meshes)
        self._find_rescues = functools.cache(find_rescues)
        self._make_plan = make_plan
        self._plans: dict[int, Plan] = {}
        self.initial = self.plan(initial)

    @classmethod
    def of(cls, plan: Plan) -> Sizes:
        """Return the only size of a run under ``plan``."""
        return cls([plan.mesh], lambda _: plan, initial=plan.mesh)

    def plan(self, mesh: Mesh) -> Plan:
        """Return the plan of the size with ``mesh``, the same object at every call."""
        if mesh.world_size not in self._plans:
            self._plans[mesh.world_size] = self._make_plan(mesh)
        return self._plans[mesh.world_size]

    def rescues(self) -> Sequence[Mesh]:
        """Return the meshes below the smallest size, in which survivors may only save what they hold."""
        return self._find_rescues()

    @property
    def smallest(self) -> Mesh:
        """The mesh of the smallest size."""
        return self.meshes[0]

    @property
    def largest(self) -> Plan:
        """The plan of the largest size."""
        return self.plan(self.meshes[-1])

    @property
    def max_processes(self) -> int:
        """The number of ranks and spares of the largest size."""
        return self.meshes[-1].world_size + self.initial.spares

    @property
    def is_elastic(self) -> bool:
        """Whether the run may change its size."""
        return len(self.meshes) > 1

    def fitting(self, room: int) -> Plan:
        """Return the plan of the largest size that leaves room for its spares among ``room`` workers.

        That of the smallest size if there is none.
        """
        fitting = [mesh for mesh in self.meshes if mesh.world_size + self.initial.spares <= room]
        return self.plan(fitting[-1] if fitting else self.smallest)

    def next_request(self, refused: Plan, room: int, *, patience_is_over: bool) -> Plan:
        """Return the plan that a run asks for when it has given up to wait for the workers of ``refused``.

        Args:
            refused: the plan whose workers Ray has not placed.
            room: for how many workers there is room.
            patience_is_over: whether the wait has ended for its length, and not because other nodes are to be avoided:
                these are no reason alone to begin with fewer workers.
        """
        fitting = self.fitting(room)
        return fitting if patience_is_over or fitting.world_size > refused.world_size else refused


@dataclass(frozen=True, kw_only=True)
class RankAssignment:
    """The worker of each rank of ``plan`` in the next generation.

    Attributes:
        before: for each rank the one that its worker had before; None for a new worker.
        state_sources: for each rank an old rank with the same state; None if ``plan`` divides the model in another way,
            so that no old rank has it.
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
        sizes: the sizes to choose from.
        alive: the ranks of ``plan`` whose workers continue.
        ready: the number of new workers that could take a rank at once.
        saved: a checkpoint holds all of the state.

    Returns:
        None if there are too few workers for the smallest size.
    """
    larger_first = [mesh for mesh in reversed(sizes.meshes) if mesh.world_size <= len(alive) + ready]
    if not larger_first:
        return None
    largest = larger_first[0]
    in_place = _largest_in_place(plan.mesh, larger_first, alive, ready=ready)
    if in_place is None or (saved and in_place.world_size < largest.world_size):
        return _assign_in_order(sizes.plan(largest), alive)
    return _assign_in_place(plan.mesh, sizes.plan(in_place), alive)


def find_rescue(plan: Plan, sizes: Sizes, alive: Collection[int]) -> RankAssignment | None:
    """Find a size, however small, in which the survivors can save what they hold; None if there is none.

    It takes the arguments of :func:`find_rank_assignment`.
    """
    meshes = [mesh for mesh in (*sizes.rescues(), *sizes.meshes) if mesh.world_size <= len(alive)]
    mesh = _largest_in_place(plan.mesh, meshes[::-1], alive, ready=0)
    return None if mesh is None else _assign_in_place(plan.mesh, sizes.plan(mesh), alive)


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


def _largest_in_place(old: Mesh, larger_first: Sequence[Mesh], alive: Collection[int], *, ready: int) -> Mesh | None:
    """Return the first mesh in which every worker can keep its stage or shard, with at most ``ready`` new workers."""
    present = [len(ranks) for ranks in _alive_by_part(old, alive).values()]
    for mesh in larger_first:
        if mesh.has_parts_of(old) and sum(max(0, mesh.replicate - number) for number in present) <= ready:
            return mesh
    return None


def _alive_by_part(mesh: Mesh, alive: Collection[int]) -> dict[Coords, list[int]]:
    """Return the ranks in ``alive`` that have each stage or shard of the model, in ascending order."""
    ranks: dict[Coords, list[int]] = {mesh.part(rank): [] for rank in range(mesh.num_workers)}
    for rank in sorted(alive):
        ranks[mesh.part(rank)].append(rank)
    return ranks


def _assign_in_place(old: Mesh, plan: Plan, alive: Collection[int]) -> RankAssignment:
    """Let every worker keep its stage or shard; ``plan`` divides the model as before."""
    new, of_part = plan.mesh, _alive_by_part(old, alive)
    first = {old.part(rank): rank for rank in reversed(range(old.num_workers))}
    before: list[int | None] = []
    state_sources: list[int] = []
    for rank in range(new.world_size):
        part, replica = new.part(rank), new.coords(rank).replicate
        own = of_part[part][replica] if replica < len(of_part[part]) else None
        before.append(own)
        state_sources.append(first[part] if own is None else own)
    return RankAssignment(plan=plan, before=tuple(before), state_sources=tuple(state_sources))


def _assign_in_order(plan: Plan, alive: Collection[int]) -> RankAssignment:
    """Give the first ranks to the workers that are alive, and the others to new ones; all load a checkpoint."""
    old: Sequence[int] = sorted(alive)
    before = tuple(old[rank] if rank < len(old) else None for rank in range(plan.world_size))
    return RankAssignment(plan=plan, before=before, state_sources=None)
