"""Whether an elastic run could continue with more workers."""

from __future__ import annotations

from orchestrator.driver.gang import Gang
from orchestrator.planning.plan import Plan
from orchestrator.policy.elastic import RankAssignment, Sizes, find_rank_assignment


class Growth:
    """Looks for workers that a run under ``plan`` could add."""

    def __init__(self, gang: Gang, sizes: Sizes, plan: Plan):
        self._gang = gang
        self._sizes = sizes
        self._plan = plan

    def start_and_find(self) -> RankAssignment | None:
        """Return a larger assignment for which all workers are ready; None if there is none.

        Starts workers in the background for sizes that the cluster has no room for yet.
        """
        plan = self._plan
        if plan is self._sizes.largest:
            return None
        self._gang.refill(self._sizes.max_processes)
        if not (ready := self._gang.ready()):
            return None
        assignment = find_rank_assignment(plan, self._sizes, range(plan.world_size), ready=ready, saved=True)
        is_larger = assignment is not None and assignment.plan.world_size > plan.world_size
        return assignment if is_larger else None
