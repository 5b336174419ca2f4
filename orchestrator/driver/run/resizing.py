"""Changes of the size of an elastic run: growth when more workers are ready, and what is left after a loss."""

from __future__ import annotations

from collections.abc import Collection

from orchestrator.display.text import count
from orchestrator.driver.gang.gang import Gang
from orchestrator.planning.plan import Plan
from orchestrator.policy.elastic import RankAssignment, Sizes, find_rank_assignment


class Resizing:
    """Finds the size in which a run with ``gang`` continues, and gives the workers their ranks in it."""

    def __init__(self, gang: Gang, sizes: Sizes):
        self._gang = gang
        self._sizes = sizes

    def refill(self, plan: Plan, *, others_wait: bool) -> None:
        """Start missing spares in the background, and workers for sizes that the cluster has no room for yet.

        If other runs wait, only those of ``plan`` are started, and what is beyond it is given back.
        """
        self._gang.refill(plan.world_size + plan.spares if others_wait else self._sizes.max_processes)

    def refill_and_find_larger(self, plan: Plan, *, others_wait: bool) -> RankAssignment | None:
        """Return an assignment larger than ``plan`` for which all workers are ready; None if there is none.

        None if other runs wait. See :meth:`refill`.
        """
        self.refill(plan, others_wait=others_wait)
        ready = self._gang.ready()
        if others_wait or not ready or plan is self._sizes.largest:
            return None
        assignment = find_rank_assignment(plan, self._sizes, range(plan.world_size), ready=ready, saved=True)
        is_larger = assignment is not None and assignment.plan.world_size > plan.world_size
        return assignment if is_larger else None

    def change(self, plan: Plan, alive: Collection[int], *, saved: bool) -> RankAssignment | None:
        """Give the present workers the ranks of a plan of another size; None if the run keeps its size.

        Waits until there are enough workers for the smallest size.

        Args:
            plan: the present plan.
            alive: its ranks whose workers continue.
            saved: a checkpoint holds all of the state.

        Raises:
            NoWorkersError: not in time, or each new worker dies at once.
            Interrupted: a stop was requested.
        """
        while self._sizes.is_elastic:
            assignment = find_rank_assignment(plan, self._sizes, alive, ready=self._gang.ready(), saved=saved)
            if assignment is None:
                least = self._sizes.smallest.world_size
                missing = least - len(alive)
                wanted = f"{count(missing, 'worker')} more (has {len(alive)}, least {least})"
                self._gang.wait_for_spares(missing, wanted)
            elif assignment.plan is plan:
                return None
            elif self._gang.reassign_ranks(assignment.plan, assignment.before):
                return assignment
        return None
