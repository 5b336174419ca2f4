"""What the workers of a pipeline did and when, and how busy they were. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
