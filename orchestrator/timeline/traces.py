"""Where the time of a step goes, in the traces of all ranks that torch's profiler has recorded. Pure.

A trace is the JSON of ``torch.profiler``'s ``export_chrome_trace``: events with times and durations in microseconds.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Trace = Mapping[str, Any]
_Interval = tuple[float, float]
"""Begin and end, in microseconds."""

_STEP = "ProfilerStep#"
_COLLECTIVE = re.compile(r"(nccl|gloo|mpi|ucc):|nccl(Dev)?Kernel")


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Where the time of the profiled steps goes, as a mean over the ranks; the parts add up to 100 %.

    Attributes:
        steps: the number of steps.
        step_ms: the mean time of a step.
        computation_pct: forward and backward passes.
        optimizer_pct: updates.
        communication_pct: communication while nothing is computed.
        data_pct: waiting for samples.
        other_pct: the rest, such as Python between the operations.
    """

    steps: int
    step_ms: float
    computation_pct: float
    optimizer_pct: float
    communication_pct: float
    data_pct: float
    other_pct: float

    def __str__(self) -> str:
        shares = {
            "computation": self.computation_pct,
            "communication that nothing hides": self.communication_pct,
            "optimizer": self.optimizer_pct,
            "waiting for samples": self.data_pct,
            "other": self.other_pct,
        }
        largest_first = sorted(shares.items(), key=lambda share: -share[1])
        named = ", ".join(f"{name} {pct:.0f}%" for name, pct in largest_first if pct >= 0.5)
        return f"{self.steps} step{'' if self.steps == 1 else 's'} of {self.step_ms:.3g} ms: {named}"


def step_parts(traces: Iterable[Trace]) -> StepParts | None:
    """Return where the time of the steps goes; None if the traces have no steps."""
    of_ranks = [parts for trace in traces if (parts := _parts_of_rank(trace)) is not None]
    if not of_ranks:
        return None
    means = [statistics.fmean(values) for values in zip(*of_ranks, strict=True)]
    steps, step_ms, *shares = means
    return StepParts(
        steps=round(steps),
        step_ms=step_ms,
        computation_pct=shares[0],
        optimizer_pct=shares[1],
        communication_pct=shares[2],
        data_pct=shares[3],
        other_pct=max(0.0, 100 - sum(shares)),
    )


def _parts_of_rank(trace: Trace) -> tuple[float, ...] | None:
    """Return the number of steps, their mean time in ms, and the percentages of the first four parts."""
    steps = _intervals(trace, lambda e: str(e["name"]).startswith(_STEP))
    total_us = _length(steps)
    if not total_us:
        return None
    on_gpu = bool(_events(trace, _is_kernel))
    optimizer = _intervals(trace, lambda e: e["name"].startswith("Optimizer.step#"))
    computation = _intervals(trace, _is_kernel if on_gpu else _is_operator)
    communication = _intervals(trace, _is_collective)
    data = _intervals(trace, lambda e: e["name"].startswith("enumerate(DataLoader)#"))
    shares, taken = [], list[_Interval]()
    for part in (optimizer, computation, communication, data):
        free = _without(part, taken)
        shares.append(100 * _overlap(free, steps) / total_us)
        taken = _union([*taken, *part])
    optimizer_pct, computation_pct, communication_pct, data_pct = shares
    return len(steps), total_us / len(steps) / 1e3, computation_pct, optimizer_pct, communication_pct, data_pct


def _is_collective(event: Mapping[str, Any]) -> bool:
    return _COLLECTIVE.match(event["name"]) is not None


def _is_kernel(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "kernel" and not _is_collective(event)


def _is_operator(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "cpu_op" and not event["name"].startswith("c10d::")


def _events(trace: Trace, wanted: Callable[[Mapping[str, Any]], bool]) -> list[Mapping[str, Any]]:
    """The complete events that are ``wanted``, in the order of their begins."""
    found = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e and wanted(e)]
    return sorted(found, key=lambda e: e["ts"])


def _intervals(trace: Trace, wanted: Callable[[Mapping[str, Any]], bool]) -> list[_Interval]:
    return _union((e["ts"], e["ts"] + e["dur"]) for e in _events(trace, wanted))


def _union(intervals: Iterable[_Interval]) -> list[_Interval]:
    """Return disjoint intervals, in order, that cover the same time."""
    found: list[_Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _without(intervals: Sequence[_Interval], taken: Sequence[_Interval]) -> list[_Interval]:
    """Return what of disjoint ``intervals`` is not in the disjoint intervals ``taken``; both are in order."""
    found: list[_Interval] = []
    remaining = iter(taken)
    hole = next(remaining, None)
    for begin, end in intervals:
        while hole is not None and hole[0] < end:
            if hole[0] > begin:
                found.append((begin, hole[0]))
            begin = max(begin, hole[1])
            if hole[1] > end:
                break
            hole = next(remaining, None)
        if begin < end:
            found.append((begin, end))
    return found


def _overlap(intervals: Sequence[_Interval], window: Sequence[_Interval]) -> float:
    return _length(intervals) - _length(_without(intervals, window))


def _length(intervals: Iterable[_Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
