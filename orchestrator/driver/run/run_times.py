"""When a run took its first step, and how long it has waited: for its turns in the queue, and for resources."""

from __future__ import annotations

import time
from typing import Any

from orchestrator.driver.gang.gang import Gang
from orchestrator.driver.queue.queue_place import QueuePlace
from orchestrator.policy.transitions import TransitionLog
from orchestrator.protocol.events import FirstStepDone


class RunTimes:
    """The times of a run that began at ``started_at``, in seconds since the epoch.

    ``startup_s``: the parts of the start, in seconds without waits, by name.
    """

    def __init__(self, started_at: float, queue: QueuePlace, gang: Gang):
        self.startup_s: dict[str, float] = {}
        self._started_at = started_at
        self._queue = queue
        self._gang = gang
        self._first_step_at: float | None = None
        self._trains_since = 0.0  # by a clock that never steps
        self._waited_before_s = 0.0

    @property
    def waited_s(self) -> float:
        """How long the run has waited until now, in seconds."""
        return self._queue.waited_s + self._gang.waited_s

    def begin_training(self, event: FirstStepDone) -> None:
        """Record the end of the start, unless it has been recorded."""
        if self._first_step_at is None:
            self._first_step_at = event.time
            self._trains_since = time.monotonic()
            self._waited_before_s = self.waited_s
            self.startup_s |= event.startup

    def summary(self, transitions: TransitionLog, *, step_s: float) -> dict[str, Any]:
        """Return the times for ``run.json``; ``step_s`` is the usual time of one step."""
        waits = {"queue_s": self._queue.waited_s, "waited_s": self._gang.waited_s}
        summary: dict[str, Any] = {key: seconds for key, seconds in waits.items() if seconds}
        if self._first_step_at is not None:
            summary["startup_s"] = self._first_step_at - self._started_at - self._waited_before_s
            summary["startup"] = self.startup_s
            elapsed_s = time.monotonic() - self._trains_since - (self.waited_s - self._waited_before_s)
            summary["effective_time_pct"] = transitions.effective_time_pct(elapsed_s, step_s=step_s, now=time.time())
        return summary
