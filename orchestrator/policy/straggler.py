"""Which rank is persistently slower than the others, not counting the time it waits for them. Pure.

Other programs may be the reason: how much they used of the machines while steps were timed is known here too.

A busy machine slows down each rank in turn, so a rank is blamed only if it has been the slow one nearly all of the time
for :data:`MIN_SLOW_S`, and if the run would be noticeably faster without the delay.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from orchestrator.protocol.events import Straggler
from orchestrator.protocol.messages import TrainPoint
from orchestrator.protocol.metrics import IDLE_CPU_PCT, OTHERS_CPU_PCT, OTHERS_GPU_PCT, MachineUse

MIN_SLOWDOWN = 1.5
"""A straggler's step takes at least this many times the median of the others."""
MIN_SLOW_S = 10.0
"""A straggler has been slow for this many seconds of training."""
MIN_SLOW_STEPS = 20
MIN_PERIOD_S = 0.5
"""Shorter points are judged together with the next ones, because the times of a few steps contain more noise."""
MIN_SLOW_PERIODS = 2
"""A straggler has been slow in this many periods: a single long pause slows down only one."""
MIN_SLOW_SHARE = 0.8
"""The share of the time, 0 to 1, in which it was slow, counted from the first of the periods in which it was."""
MIN_THROUGHPUT_LOSS = 0.1
"""A straggler costs at least this share of the run's throughput, 0 to 1."""


@dataclass(frozen=True)
class _Times:
    """A rank's times, summed over ``steps``; ``total_ms`` includes waiting for other ranks."""

    steps: int
    total_ms: float
    compute_ms: float
    data_wait_ms: float

    @property
    def own_ms(self) -> float:
        return self.compute_ms + self.data_wait_ms

    def __add__(self, other: _Times) -> _Times:
        return _Times(
            self.steps + other.steps,
            self.total_ms + other.total_ms,
            self.compute_ms + other.compute_ms,
            self.data_wait_ms + other.data_wait_ms,
        )


@dataclass(frozen=True)
class _Period:
    """One or more consecutive points: the times of each rank, and which rank was slow; None if they were even."""

    step: int
    times: Mapping[int, _Times]
    slow: int | None

    @property
    def steps(self) -> int:
        return max(t.steps for t in self.times.values())

    @property
    def seconds(self) -> float:
        return max(t.total_ms for t in self.times.values()) / 1e3


class StragglerWatch:
    """Reports each straggler once, and again if it recovers and then falls behind again."""

    def __init__(self, world_size: int):
        self._world_size = world_size
        self._points: dict[int, dict[int, _Times]] = {}
        self._begun: dict[int, _Times] = {}  # the period that is still too short
        self._periods: deque[_Period] = deque()  # the newest, as many as it takes to judge
        self._reported: set[int] = set()

    def add(self, rank: int, point: TrainPoint) -> Straggler | None:
        """Add one rank's part of a logged point; returns a new straggler once the parts of all ranks show one."""
        if not point.step_ms or self._world_size < 2:
            return None
        parts = self._points.setdefault(point.step, {})
        parts[rank] = _times(point)
        if len(parts) < self._world_size:
            return None
        del self._points[point.step]
        times = {r: t + self._begun[r] if r in self._begun else t for r, t in parts.items()}
        period = _Period(point.step, times, _slow_rank(times))
        self._begun = times if period.seconds < MIN_PERIOD_S else {}
        if self._begun:
            return None
        self._periods.append(period)
        self._drop_old_periods()
        self._reported &= {p.slow for p in self._periods if p.slow is not None}
        return self._judge()

    def forget(self, rank: int) -> None:
        """Discard what is known about a rank, which has a new worker."""
        self._points.clear()
        self._begun = {}
        self._periods = deque(replace(p, slow=None) if p.slow == rank else p for p in self._periods)
        self._reported.discard(rank)

    def _drop_old_periods(self) -> None:
        """Keep the newest periods in which a straggler could have been slow for long enough."""
        seconds, steps = sum(p.seconds for p in self._periods), sum(p.steps for p in self._periods)
        while len(self._periods) > MIN_SLOW_PERIODS:
            seconds, steps = seconds - self._periods[0].seconds, steps - self._periods[0].steps
            if seconds * MIN_SLOW_SHARE < MIN_SLOW_S or steps * MIN_SLOW_SHARE < MIN_SLOW_STEPS:
                return
            self._periods.popleft()

    def _judge(self) -> Straggler | None:
        """Return the rank that is slow in the newest period, if it has been for long enough and is a new one."""
        rank = self._periods[-1].slow
        if rank is None or rank in self._reported:
            return None
        total_s = slow_s = 0.0
        slow: list[_Period] = []
        for period in reversed(self._periods):
            total_s += period.seconds
            if period.slow != rank:
                continue
            slow.append(period)
            slow_s += period.seconds
            if slow_s < MIN_SLOW_S or slow_s < MIN_SLOW_SHARE * total_s:
                continue
            if len(slow) < MIN_SLOW_PERIODS or sum(p.steps for p in slow) < MIN_SLOW_STEPS:
                continue
            straggler = _describe(rank, slow, total_s)
            if straggler.throughput_loss >= MIN_THROUGHPUT_LOSS:
                self._reported.add(rank)
                return straggler
        return None


def _times(point: TrainPoint) -> _Times:
    total_ms = sum(point.step_ms)
    own_ms = total_ms * (1 - (point.comm_share or 0.0))
    data_wait_ms = min(point.data_wait_ms * len(point.step_ms), own_ms)
    return _Times(len(point.step_ms), total_ms, own_ms - data_wait_ms, data_wait_ms)


def _slow_rank(times: Mapping[int, _Times]) -> int | None:
    """Return the slowest rank if it is :data:`MIN_SLOWDOWN` times slower than the others; None otherwise."""
    slowest = max(times, key=lambda r: times[r].own_ms)
    usual_ms = statistics.median(t.own_ms for r, t in times.items() if r != slowest)
    return slowest if times[slowest].own_ms > MIN_SLOWDOWN * usual_ms else None


def _describe(rank: int, slow: list[_Period], total_s: float) -> Straggler:
    """Return the times of ``rank`` in the periods in which it was slow, the newest first, out of ``total_s`` seconds.

    The others' part is the sum of their medians.
    """
    steps = sum(p.steps for p in slow)
    own = [p.times[rank] for p in slow]
    others = [[t for r, t in p.times.items() if r != rank] for p in slow]
    compute_ms, data_wait_ms = sum(t.compute_ms for t in own), sum(t.data_wait_ms for t in own)
    others_compute_ms = sum(statistics.median(t.compute_ms for t in ts) for ts in others)
    others_data_wait_ms = sum(statistics.median(t.data_wait_ms for t in ts) for ts in others)
    own_ms, others_ms = compute_ms + data_wait_ms, others_compute_ms + others_data_wait_ms
    return Straggler(
        rank=rank,
        step=slow[0].step,
        slower_by=own_ms / others_ms,
        compute_ms=compute_ms / steps,
        others_compute_ms=others_compute_ms / steps,
        data_wait_ms=data_wait_ms / steps,
        others_data_wait_ms=others_data_wait_ms / steps,
        throughput_loss=(own_ms - others_ms) / 1e3 / total_s,
    )


@dataclass
class _Node:
    own_s: float = 0.0
    busy_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # as each rank has measured it
    idle_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))


class SharedMachine:
    """Collects the readings of all ranks.

    Ranks on one node measure the same node at about the same times, so the longest measurement of it counts.
    """

    def __init__(self) -> None:
        self._nodes: defaultdict[str, _Node] = defaultdict(_Node)
        self._gpu_pct: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])  # by rank: sum and number

    def add(self, rank: int, node_id: str, use: MachineUse) -> None:
        """Add the reading of a rank; ``node_id``: where it ran."""
        node = self._nodes[node_id]
        node.own_s += use.own_s
        node.busy_s[rank] += use.busy_s
        node.idle_s[rank] += use.idle_s
        if use.others_gpu_pct is not None:
            self._gpu_pct[rank][0] += use.others_gpu_pct
            self._gpu_pct[rank][1] += 1

    def summary(self, *, driver_node: str, driver_s: float) -> Mapping[str, float]:
        """Return the shares, in percent, that others used and that stood idle; empty if nothing was measured.

        Args:
            driver_node: the id of the node of the driver.
            driver_s: the CPU seconds of the driver in the same time.
        """
        found = []
        for node_id, node in self._nodes.items():
            rank = max(node.busy_s, key=lambda r: node.busy_s[r] + node.idle_s[r])
            busy_s, idle_s = node.busy_s[rank], node.idle_s[rank]
            if busy_s + idle_s > 0:
                own_s = node.own_s + (driver_s if node_id == driver_node else 0.0)
                share = 100 / (busy_s + idle_s)
                found.append((max(0.0, busy_s - own_s) * share, idle_s * share))
        summary = dict(zip((OTHERS_CPU_PCT, IDLE_CPU_PCT), max(found), strict=True)) if found else {}
        gpus = [total / number for total, number in self._gpu_pct.values()]
        return {**summary, OTHERS_GPU_PCT: max(gpus)} if gpus else summary
