"""What the training thread and the control thread of a worker share."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from orchestrator.events import Event
from orchestrator.messages import EvalPoint, Heartbeat, Phase, TrainPoint


class StepGate:
    """Lets all ranks stop after the same step, at no cost while nobody asks.

    Synchronous ranks are at most one step apart. The driver first holds every rank, learns the last
    step that each has begun, and then lets all of them finish the most advanced of these steps.
    """

    def __init__(self, *, timeout_s: float):
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._begun = 0
        self._held = False
        self._last: int | None = None

    def begin(self, step: int) -> bool:
        """Ask to begin ``step``; waits while held. False: stop instead.

        Raises:
            TimeoutError: held, and no further word from the driver.
        """
        with self._changed:
            decided = self._changed.wait_for(lambda: not self._held or self._last is not None, timeout=self._timeout_s)
            if not decided:
                raise TimeoutError(f"held at step {step} for {self._timeout_s} s by the driver")
            if self._last is not None and step > self._last:
                return False
            self._begun = step
            return True

    def hold(self) -> int:
        """No further step begins; returns the last one that has."""
        with self._changed:
            self._held = True
            return self._begun

    def stop_after(self, step: int) -> None:
        """Steps up to ``step`` may begin, none after it."""
        with self._changed:
            self._last = step
            self._changed.notify_all()


class Outbox:
    """Where the training thread leaves its progress for the driver to collect."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = 0
        self._phase: Phase = "start"
        self._busy_ms: float | None = None
        self._points: list[TrainPoint | EvalPoint] = []
        self._events: list[Event] = []

    def at(self, step: int, phase: Phase) -> None:
        # Two assignments; the lock would cost more than a torn pair, which the next beat mends.
        self._step, self._phase = step, phase

    def put_point(self, point: TrainPoint | EvalPoint) -> None:
        with self._lock:
            self._points.append(point)
            if isinstance(point, TrainPoint) and point.step_ms:
                mean = sum(point.step_ms) / len(point.step_ms)
                self._busy_ms = mean * (1 - (point.comm_share or 0.0))

    def put_event(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def collect(self, system: Mapping[str, float]) -> Heartbeat:
        """Everything since the last call."""
        with self._lock:
            points, self._points = self._points, []
            events, self._events = self._events, []
            return Heartbeat(
                step=self._step,
                phase=self._phase,
                busy_ms=self._busy_ms,
                points=tuple(points),
                events=tuple(events),
                system=system,
            )
