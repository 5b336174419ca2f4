"""The clocks of stale synchronous parallel (Ho et al., NIPS 2013). Pure."""

from __future__ import annotations

from collections.abc import Sequence


class WorkerClocks:
    """Counts each worker's applied steps and decides which workers may continue.

    Attributes:
        max_lead: the largest lead over the slowest worker at which a worker was let go, since the caller last set it
            to 0.
    """

    def __init__(self, workers: Sequence[int], *, step: int, bound: int | None):
        """Start all clocks.

        Args:
            workers: the ranks of the workers.
            step: the last step whose gradients have been applied.
            bound: how many steps a worker may be ahead of the slowest; None for no bound.
        """
        self._steps = dict.fromkeys(workers, step)
        self._bound = bound
        self._waiting: set[int] = set()
        self.max_lead = 0

    @property
    def slowest(self) -> int:
        """The last step of the slowest worker."""
        return min(self._steps.values())

    def advance(self, worker: int) -> list[int]:
        """Count a gradient of ``worker``.

        Returns:
            The workers that may continue now, in the order of their ranks.
        """
        self._steps[worker] += 1
        self._waiting.add(worker)
        slowest, released = self.slowest, []
        for waiting in sorted(self._waiting):
            lead = self._steps[waiting] - slowest
            if self._bound is None or lead <= self._bound:
                self.max_lead = max(self.max_lead, lead)
                released.append(waiting)
        self._waiting.difference_update(released)
        return released
