"""What the workers of a pipeline did and when, and how busy they were. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

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
