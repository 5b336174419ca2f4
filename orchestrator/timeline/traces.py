"""The traces of all ranks, which torch's profiler has recorded, as one trace, and where the time of a step goes. Pure.

A trace is the JSON of ``torch.profiler``'s ``export_chrome_trace``: events with times and durations in microseconds.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Trace = Mapping[str, Any]
Interval = tuple[float, float]
"""Begin and end, in microseconds."""

_STEP = "ProfilerStep#"
_COLLECTIVE = re.compile(r"(nccl|gloo|mpi|ucc):|nccl(Dev)?Kernel")
_FLOW_IDS = 1 << 32
"""Flow events of a rank have smaller ids."""


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


def merged(traces: Mapping[int, Trace]) -> dict[str, Any]:
    """Return one trace with a process for each rank and device, on the clock of the lowest rank.

    Args:
        traces: the trace of each rank.
    """
    first = min(traces)
    events: list[dict[str, Any]] = []
    processes = itertools.count(1)
    for rank in sorted(traces):
        trace = traces[rank]
        shift_us = (trace["baseTimeNanoseconds"] - traces[first]["baseTimeNanoseconds"]) / 1e3
        shift_us -= clock_offset_us(traces[first], trace)
        numbers: dict[int, int] = {}
        for event in trace["traceEvents"]:
            pid = event.get("pid")
            if not isinstance(pid, int):  # marks of the profiler itself
                continue
            if pid not in numbers:
                numbers[pid] = next(processes)
                events.append(_process_name(numbers[pid], f"rank {rank}" + _device(pid, trace)))
                events.append(_sort_index(numbers[pid], rank))
            if event.get("name") in ("process_name", "process_sort_index", "process_labels"):
                continue
            moved = {**event, "pid": numbers[pid]}
            if "ts" in event:
                moved["ts"] = event["ts"] + shift_us
            if event.get("ph") in ("s", "t", "f"):
                moved["id"] = event["id"] + rank * _FLOW_IDS
            events.append(moved)
    return {**{k: v for k, v in traces[first].items() if k != "traceName"}, "traceEvents": events}


def clock_offset_us(one: Trace, other: Trace) -> float:
    """Return how far the clock of the host of ``other`` is ahead of that of ``one``; 0 on one host.

    A collective operation ends on all its ranks at about the same time.
    """
    if one.get("host_name") == other.get("host_name"):
        return 0.0
    for wanted in (_is_collective, _is_step):
        ends, other_ends = ([e["ts"] + e["dur"] for e in _events(trace, wanted)] for trace in (one, other))
        if ends and len(ends) == len(other_ends):
            base_us = (other["baseTimeNanoseconds"] - one["baseTimeNanoseconds"]) / 1e3
            return float(base_us + statistics.median(b - a for a, b in zip(ends, other_ends, strict=True)))
    return 0.0


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
    steps = _intervals(trace, _is_step)
    total_us = _length(steps)
    if not total_us:
        return None
    on_gpu = bool(_events(trace, _is_kernel))
    optimizer = _intervals(trace, lambda e: e["name"].startswith("Optimizer.step#"))
    computation = _intervals(trace, _is_kernel if on_gpu else _is_operator)
    communication = _intervals(trace, _is_collective)
    data = _intervals(trace, lambda e: e["name"].startswith("enumerate(DataLoader)#"))
    shares, taken = [], list[Interval]()
    for part in (optimizer, computation, communication, data):
        free = _without(part, taken)
        shares.append(100 * _overlap(free, steps) / total_us)
        taken = _union([*taken, *part])
    optimizer_pct, computation_pct, communication_pct, data_pct = shares
    return len(steps), total_us / len(steps) / 1e3, computation_pct, optimizer_pct, communication_pct, data_pct


def _is_step(event: Mapping[str, Any]) -> bool:
    return str(event["name"]).startswith(_STEP)


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


def _intervals(trace: Trace, wanted: Callable[[Mapping[str, Any]], bool]) -> list[Interval]:
    return _union((e["ts"], e["ts"] + e["dur"]) for e in _events(trace, wanted))


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals, in order, that cover the same time."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _without(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """Return what of disjoint ``intervals`` is not in the disjoint intervals ``taken``; both are in order."""
    found: list[Interval] = []
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


def _overlap(intervals: Sequence[Interval], window: Sequence[Interval]) -> float:
    return _length(intervals) - _length(_without(intervals, window))


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _device(pid: int, trace: Trace) -> str:
    """The GPU whose work a process of a trace is; empty for the process of the rank."""
    labels = {e["pid"]: e["args"]["labels"] for e in trace["traceEvents"] if e.get("name") == "process_labels"}
    label = labels.get(pid, "CPU")
    return "" if label == "CPU" else f", {label}"


def _process_name(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _sort_index(pid: int, rank: int) -> dict[str, Any]:
    return {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": rank}}
