"""What the workers of a pipeline did and when: measured, and replayed from the order of their actions. Pure.

A replay takes unit times, for the bubble of a schedule, or measured ones. For the bubble, the order comes from the
measured spans of a step, so it is the one that was executed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

ActionKind = Literal["F", "B", "I", "W"]
"""F: forward; B: backward; I and W: the halves of a backward pass, for the inputs and for the weights."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """An action of a stage on a micro-batch.

    Attributes:
        microbatch: counted over the whole step.
        start: wall-clock seconds.
        end: wall-clock seconds.
    """

    kind: ActionKind
    stage: int
    microbatch: int
    start: float
    end: float


def busy_s(spans: Iterable[Span]) -> float:
    """Return the seconds of work in the spans of one worker, which do not overlap."""
    return math.fsum(s.end - s.start for s in spans)


def extent_s(workers: Sequence[Sequence[Span]]) -> float:
    """Return the seconds from the first start to the last end over the ``workers`` of a pipeline."""
    return max(s.end for w in workers for s in w) - min(s.start for w in workers for s in w)


def bubble(workers: Sequence[Sequence[Span]]) -> float:
    """Return the share of time, 0 to 1, that the ``workers`` of a pipeline are idle between its start and its end."""
    return 1 - math.fsum(busy_s(w) for w in workers) / (len(workers) * extent_s(workers))


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step of all replicas of a pipeline; ``replicas[dp_rank][pp_rank]`` has the spans of a worker."""

    step: int
    replicas: Sequence[Sequence[Sequence[Span]]]
    theoretical_bubble: float

    @property
    def bubble(self) -> float:
        """The measured bubble, 0 to 1: the mean over the replicas."""
        return statistics.fmean(bubble(workers) for workers in self.replicas)

    @property
    def idle_s(self) -> float:
        """The seconds of the step in which a worker waits for other stages: the mean over the workers."""
        return statistics.fmean(bubble(workers) * extent_s(workers) for workers in self.replicas)

    @property
    def busiest(self) -> float:
        """The share of the step, 0 to 1, in which the busiest worker works."""
        return max(busy_s(spans) / extent_s(workers) for workers in self.replicas for spans in workers)

    def stage_busy(self) -> dict[int, float]:
        """Return, by stage, the share of a step, 0 to 1, that it works: the mean over the replicas."""
        shares: dict[int, float] = {}
        for workers in self.replicas:
            for spans in workers:
                for stage in sorted({s.stage for s in spans}):
                    share = busy_s(s for s in spans if s.stage == stage) / extent_s(workers)
                    shares[stage] = shares.get(stage, 0.0) + share / len(self.replicas)
        return dict(sorted(shares.items()))


def aligned(workers: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """Return the spans of the ``workers`` of a pipeline, by ``pp_rank``, in the time of the first worker.

    Clocks that agree with every message are left alone, as on one host. The activations and gradients that two workers
    exchange show by how much their clocks differ: no action starts before its input has arrived, so every message
    limits the difference from one side, and every message in the other direction from the other side.
    """
    offset_s, on_one_clock = 0.0, [list(workers[0])]
    for before, after in itertools.pairwise(workers):
        offset_s += clock_offset_s(before, after)
        on_one_clock.append([replace(s, start=s.start - offset_s, end=s.end - offset_s) for s in after])
    return on_one_clock


def clock_offset_s(one: Sequence[Span], other: Sequence[Span]) -> float:
    """Return how far the clock of the ``other`` worker is ahead of ``one``'s, in seconds; 0 if it may be right.

    Otherwise, it is the middle of the range that the messages between the two allow.
    """
    most, least = _shortest_delay_s(one, other), -_shortest_delay_s(other, one)
    if least <= 0 <= most or math.isinf(most) or math.isinf(least):
        return 0.0
    return (least + most) / 2


def _shortest_delay_s(sender: Sequence[Span], receiver: Sequence[Span]) -> float:
    """Return the shortest time from an action of ``sender`` to one that needs its result; infinite if none does."""
    ends = {("B" if s.kind == "I" else s.kind, s.stage, s.microbatch): s.end for s in sender}
    delays_s = [span.start - ends[need] for span in receiver if (need := _input_of(span)) in ends]
    return min(delays_s, default=math.inf)


def _input_of(span: Span) -> tuple[ActionKind, int, int] | None:
    """Return kind, stage and micro-batch of the action at another stage that ``span`` needs; B stands for I too."""
    match span.kind:
        case "F":
            return "F", span.stage - 1, span.microbatch
        case "B" | "I":
            return "B", span.stage + 1, span.microbatch
    return None


Action = tuple[ActionKind, int, int]
"""``(kind, stage, microbatch)``"""

UNIT_TIMES: dict[ActionKind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""A backward pass takes twice as long as a forward pass, and its halves are equal, as in the papers on schedules."""


def unit_time(action: Action) -> float:
    """Return the duration of ``action`` in :data:`UNIT_TIMES`."""
    return UNIT_TIMES[action[0]]


def order_of(spans: Iterable[Span]) -> list[Action]:
    """Return the actions of a worker in the order of their start."""
    return [(s.kind, s.stage, s.microbatch) for s in sorted(spans, key=lambda s: s.start)]


def simulate(
    orders: Sequence[Sequence[Action]],
    *,
    duration_of: Callable[[Action], float] = unit_time,
    delay_of: Callable[[int], float] = lambda stage: 0.0,
    slowdown: Callable[[int], float] = lambda busy: 1.0,
) -> list[list[Span]]:
    """Return the spans of each worker of a pipeline if every action starts as early as it can.

    An action starts after the previous action of its worker and after the actions whose results it needs. For
    DualPipeV the bubble comes out too small: it sends the results of a pair of passes after both, and the order does
    not show the pairs.

    Args:
        orders: the actions of each worker in their order.
        duration_of: how long an action takes while no other worker computes.
        delay_of: how long the output of a stage, or its gradient, takes to another worker.
        slowdown: by the number of workers that compute at once, the factor by which each takes longer.

    Raises:
        ValueError: actions wait for one another, or for an action that no worker executes.
    """
    last_stage = max(stage for order in orders for _, stage, _ in order)
    worker_of = {stage: worker for worker, order in enumerate(orders) for _, stage, _ in order}
    done_at: dict[Action, float] = {}
    waiting = [deque(order) for order in orders]
    running: dict[int, tuple[Action, float, float]] = {}  # by worker: the action, its start, the work that is left
    done: list[list[Span]] = [[] for _ in orders]
    now = 0.0

    def ready_at(action: Action) -> float:
        """Return when the results that ``action`` needs are on its worker; infinity if that is not known yet."""
        times = [0.0]
        for need in _needs(action, last_stage):
            _, stage, _ = need
            elsewhere = worker_of.get(stage) != worker_of[action[1]]
            message = delay_of(min(stage, action[1])) if elsewhere else 0.0
            times.append(done_at.get(need, math.inf) + message)
        return max(times)

    while any(waiting) or running:
        next_start = math.inf
        for worker, actions in enumerate(waiting):
            if worker in running or not actions:
                continue
            if (ready := ready_at(actions[0])) <= now:
                action = actions.popleft()
                running[worker] = (action, now, duration_of(action))
            else:
                next_start = min(next_start, ready)
        factor = slowdown(len(running))
        next_end = now + min((left * factor for _, _, left in running.values()), default=math.inf)
        before, now = now, min(next_start, next_end)
        if now == math.inf:
            raise ValueError(f"no action can start: {[actions[0] for actions in waiting if actions]}")
        for worker, (action, start, left) in list(running.items()):
            if before + left * factor > now:
                running[worker] = (action, start, left - (now - before) / factor)
                continue
            kind, stage, microbatch = action
            done[worker].append(Span(kind=kind, stage=stage, microbatch=microbatch, start=start, end=now))
            done_at["B" if kind == "I" else kind, stage, microbatch] = now
            del running[worker]
    return done


def theoretical_bubble(workers: Sequence[Sequence[Span]]) -> float:
    """Return the bubble, 0 to 1, that the order of these spans has under ideal conditions: in unit time, alone."""
    return bubble(simulate([order_of(w) for w in workers]))


def _needs(action: Action, last_stage: int) -> list[Action]:
    """The actions of any worker that must precede ``action``. B stands for I too: both send the gradient."""
    kind, stage, microbatch = action
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage > 0 else []
    if kind == "W":
        return [("B", stage, microbatch)]
    after: list[Action] = [("B", stage + 1, microbatch)] if stage < last_stage else []
    return [("F", stage, microbatch), *after]


_NAMES: dict[ActionKind, str] = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline in the Trace Event Format, in microseconds: replicas are processes, workers are threads."""
    origin = min(s.start for workers in timeline.replicas for spans in workers for s in spans)
    events: list[dict[str, Any]] = []
    for dp_rank, workers in enumerate(timeline.replicas):
        events.append(_named("process_name", f"replica {dp_rank}", pid=dp_rank))
        for pp_rank, spans in enumerate(workers):
            events.append(_named("thread_name", _stages_text(spans), pid=dp_rank, tid=pp_rank))
            for span in spans:
                start, end = (round((t - origin) * 1e6, 1) for t in (span.start, span.end))
                events.append(
                    {
                        "name": f"{span.kind}{span.microbatch}",
                        "cat": _NAMES[span.kind],
                        "ph": "X",
                        "ts": start,
                        "dur": round(end - start, 1),
                        "pid": dp_rank,
                        "tid": pp_rank,
                        "args": {"stage": span.stage, "microbatch": span.microbatch},
                    }
                )
    summary = {"step": timeline.step, "bubble": timeline.bubble, "theoretical_bubble": timeline.theoretical_bubble}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": summary}


def _named(what: str, name: str, **where: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "args": {"name": name}, **where}


def _stages_text(spans: Sequence[Span]) -> str:
    stages = sorted({s.stage for s in spans})
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
