"""What the training thread and the control thread of a worker share."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from orchestrator.protocol.events import Event
from orchestrator.protocol.messages import EvalPoint, Heartbeat, Phase, TrainPoint

MEMORY = 0.1
"""The weight of the newest batch in the mean time of one."""


class AbandonedError(ConnectionError):
    """The driver has ended this generation: another rank was lost."""


class StepGate:
    """Lets all ranks stop after the same step, or at once, at no cost while nobody asks.

    Synchronous ranks are at most one step apart. The driver first holds every rank, learns the last
    step that each has begun, and then lets all of them finish the most advanced of these steps. ``saves``: they leave
    a checkpoint when they stop.
    """

    def __init__(self, *, timeout_s: float):
        self.saves = True
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._begun = 0
        self._held = False
        self._last: int | None = None
        self._abandoned = 0

    def begin(self, step: int, generation: int) -> bool:
        """Ask to begin ``step``; waits while held. False: stop instead, and save if the gate ``saves``.

        Raises:
            TimeoutError: held, and no further word from the driver.
            AbandonedError: the generation has ended.
        """
        with self._changed:
            decided = self._changed.wait_for(
                lambda: not self._held or self._last is not None or generation <= self._abandoned,
                timeout=self._timeout_s,
            )
            self.check(generation)
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

    def abandon(self, generation: int) -> None:
        """This generation and those before it have ended, even if this rank has not noticed."""
        with self._changed:
            self._abandoned = max(self._abandoned, generation)
            self._changed.notify_all()

    def check(self, generation: int) -> None:
        """To be called where a rank could go on for long without any other.

        Raises:
            AbandonedError: the generation has ended.
        """
        if generation <= self._abandoned:
            raise AbandonedError(f"generation {generation} has ended: another rank was lost")

    def finish_step(self, step: int, save: bool) -> None:
        """Steps up to ``step`` may begin, none after it."""
        with self._changed:
            self._last, self.saves = step, save
            self._changed.notify_all()

    def open(self) -> None:
        """After a stop: steps may begin again, in another generation."""
        with self._changed:
            self._held, self._last, self.saves = False, None, True
            self._changed.notify_all()


class Outbox:
    """Where the training thread leaves its progress for the driver to collect."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = 0
        self._phase: Phase = "start"
        self._ticks = 0
        self._ticked_at: float | None = None
        self._usual_tick_s: float | None = None
        self._busy_ms: float | None = None
        self._points: list[TrainPoint | EvalPoint] = []
        self._events: list[Event] = []

    def at(self, step: int, phase: Phase) -> None:
        # Two assignments; the lock would cost more than a torn pair, which the next beat mends.
        if phase != self._phase:
            self._ticked_at = None  # what happened in between is no batch
        self._step, self._phase = step, phase

    def tick(self) -> None:
        """The rank has got on: another batch."""
        now = time.monotonic()
        if self._ticked_at is not None:
            took_s = now - self._ticked_at
            before_s = self._usual_tick_s or took_s
            self._usual_tick_s = before_s + MEMORY * (took_s - before_s)
        self._ticked_at = now
        self._ticks += 1

    def put_point(self, point: TrainPoint | EvalPoint) -> None:
        with self._lock:
            self._points.append(point)
            if isinstance(point, TrainPoint) and point.step_ms:
                mean = sum(point.step_ms) / len(point.step_ms)
                self._busy_ms = mean * (1 - (point.comm_share or 0.0))

    def put_event(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def collect(self, system: Mapping[str, float], *, leaving: bool = False) -> Heartbeat:
        """Everything since the last call."""
        with self._lock:
            points, self._points = self._points, []
            events, self._events = self._events, []
            return Heartbeat(
                step=self._step,
                phase=self._phase,
                ticks=self._ticks,
                usual_tick_s=self._usual_tick_s,
                busy_ms=self._busy_ms,
                points=tuple(points),
                events=tuple(events),
                system=system,
                leaving=leaving,
            )
