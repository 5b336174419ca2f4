"""Which rank is persistently slower than the others, by its own time: without waiting for other ranks. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

from orchestrator.protocol.messages import TrainPoint

CLEARLY_SLOWER = 1.5
WORTH_SAYING_MS = 2.0
"""Less than this per step is what the machine's other work costs now one rank, now another."""
POINTS_IN_A_ROW = 2
STEPS_AT_LEAST = 10
"""A rank has to be slower in so many logged points in a row, over so many steps together."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """Mean times of a step in milliseconds, of the rank and of the median of the others."""

    rank: int
    step: int
    compute_ms: float
    others_compute_ms: float
    data_wait_ms: float
    others_data_wait_ms: float

    @property
    def slower_by(self) -> float:
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
    """Names each straggler once, until it is itself again."""

    def __init__(self, world_size: int):
        self._world_size = world_size
        self._points: dict[int, dict[int, _Times]] = defaultdict(dict)
        self._slow_points: dict[int, list[int]] = defaultdict(list)  # by rank: the steps in each point in a row
        self._named: set[int] = set()

    def add(self, rank: int, point: TrainPoint) -> Straggler | None:
        """One rank's part of a logged point; a straggler, if the parts of all ranks show a new one."""
        if not point.step_ms or self._world_size < 2:
            return None
        parts = self._points[point.step]
        parts[rank] = _times(point)
        if len(parts) < self._world_size:
            return None
        del self._points[point.step]
        return self._judge(point.step, parts)

    def forget(self, rank: int) -> None:
        """The rank has a new worker."""
        self._points.clear()
        self._slow_points.pop(rank, None)
        self._named.discard(rank)

    def _judge(self, step: int, parts: dict[int, _Times]) -> Straggler | None:
        slowest = max(parts, key=lambda r: parts[r].own_ms)
        others = [t for r, t in parts.items() if r != slowest]
        usual_ms = statistics.median(t.own_ms for t in others)
        slow = parts[slowest].own_ms > max(CLEARLY_SLOWER * usual_ms, usual_ms + WORTH_SAYING_MS)
        for rank in parts:
            if rank != slowest or not slow:
                self._slow_points.pop(rank, None)
                self._named.discard(rank)
        if not slow:
            return None
        row = self._slow_points[slowest]
        row.append(parts[slowest].steps)
        if slowest in self._named or len(row) < POINTS_IN_A_ROW or sum(row) < STEPS_AT_LEAST:
            return None
        self._named.add(slowest)
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
