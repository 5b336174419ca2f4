"""Which rank is persistently slower than the others, not counting the time it waits for them. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

from orchestrator.protocol.messages import TrainPoint

MIN_SLOWDOWN = 1.5
"""A straggler's step takes at least this many times the median of the others."""
MIN_DIFFERENCE_MS = 2.0
"""Ignore smaller differences per step: other processes on the machine cause them, on changing ranks."""
MIN_POINTS = 2
MIN_STEPS = 10
"""A straggler is slower in this many consecutive logged points, which cover this many steps in total."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A slow rank: its mean times per step, in milliseconds, and the median of those of the others."""

    rank: int
    step: int
    compute_ms: float
    others_compute_ms: float
    data_wait_ms: float
    others_data_wait_ms: float

    @property
    def slower_by(self) -> float:
        """How many times longer the rank takes than the others."""
        return (self.compute_ms + self.data_wait_ms) / (self.others_compute_ms + self.others_data_wait_ms)


@dataclass(frozen=True)
class _Times:
    compute_ms: float
    data_wait_ms: float
    steps: int

    @property
    def own_ms(self) -> float:
        return self.compute_ms + self.data_wait_ms


class StragglerWatch:
    """Reports each straggler once, and again if it recovers and then falls behind again."""

    def __init__(self, world_size: int):
        self._world_size = world_size
        self._points: dict[int, dict[int, _Times]] = defaultdict(dict)
        self._slow_points: dict[int, list[int]] = defaultdict(list)  # by rank: the steps of each consecutive point
        self._reported: set[int] = set()

    def add(self, rank: int, point: TrainPoint) -> Straggler | None:
        """Add one rank's part of a logged point; returns a new straggler once the parts of all ranks show one."""
        if not point.step_ms or self._world_size < 2:
            return None
        parts = self._points[point.step]
        parts[rank] = _times(point)
        if len(parts) < self._world_size:
            return None
        del self._points[point.step]
        return self._judge(point.step, parts)

    def forget(self, rank: int) -> None:
        """Discard what is known about a rank, which has a new worker."""
        self._points.clear()
        self._slow_points.pop(rank, None)
        self._reported.discard(rank)

    def _judge(self, step: int, parts: dict[int, _Times]) -> Straggler | None:
        slowest = max(parts, key=lambda r: parts[r].own_ms)
        others = [t for r, t in parts.items() if r != slowest]
        usual_ms = statistics.median(t.own_ms for t in others)
        slow = parts[slowest].own_ms > max(MIN_SLOWDOWN * usual_ms, usual_ms + MIN_DIFFERENCE_MS)
        for rank in parts:
            if rank != slowest or not slow:
                self._slow_points.pop(rank, None)
                self._reported.discard(rank)
        if not slow:
            return None
        row = self._slow_points[slowest]
        row.append(parts[slowest].steps)
        if slowest in self._reported or len(row) < MIN_POINTS or sum(row) < MIN_STEPS:
            return None
        self._reported.add(slowest)
        return Straggler(
            rank=slowest,
            step=step,
            compute_ms=parts[slowest].compute_ms,
            others_compute_ms=statistics.median(t.compute_ms for t in others),
            data_wait_ms=parts[slowest].data_wait_ms,
            others_data_wait_ms=statistics.median(t.data_wait_ms for t in others),
        )


def _times(point: TrainPoint) -> _Times:
    own_ms = statistics.fmean(point.step_ms) * (1 - (point.comm_share or 0.0))
    data_wait_ms = min(point.data_wait_ms, own_ms)
    return _Times(compute_ms=own_ms - data_wait_ms, data_wait_ms=data_wait_ms, steps=len(point.step_ms))
