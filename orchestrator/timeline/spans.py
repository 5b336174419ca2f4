"""What the workers of a pipeline did when, and how busy that kept them. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "I", "W"]
"""F forward, B backward, or its two halves: I for the inputs and W for the weights."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Work of a stage on a micro-batch, in wall-clock seconds; ``microbatch`` counts through the whole step."""

    kind: Kind
    stage: int
    microbatch: int
    start: float
    end: float


def busy_s(spans: Iterable[Span]) -> float:
    """How long the work took; one worker does one thing at a time."""
    return math.fsum(s.end - s.start for s in spans)


def extent_s(workers: Sequence[Sequence[Span]]) -> float:
    """From the first start to the last end over the ``workers`` of a pipeline."""
    return max(s.end for w in workers for s in w) - min(s.start for w in workers for s in w)


def bubble(workers: Sequence[Sequence[Span]]) -> float:
    """The part of their time, 0 to 1, that the ``workers`` of a pipeline wait between its first start and last end."""
    return 1 - math.fsum(busy_s(w) for w in workers) / (len(workers) * extent_s(workers))


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step of a pipeline and its replicas: ``replicas[dp_rank][pp_rank]`` is what that worker did."""

    step: int
    replicas: Sequence[Sequence[Sequence[Span]]]
    theoretical_bubble: float

    @property
    def bubble(self) -> float:
        """As measured, the mean of the replicas."""
        return statistics.fmean(bubble(workers) for workers in self.replicas)

    def stage_busy(self) -> dict[int, float]:
        """The part of the time of a step, 0 to 1, that each stage works, the mean of its replicas."""
        shares: dict[int, float] = {}
        for workers in self.replicas:
            for spans in workers:
                for stage in sorted({s.stage for s in spans}):
                    share = busy_s(s for s in spans if s.stage == stage) / extent_s(workers)
                    shares[stage] = shares.get(stage, 0.0) + share / len(self.replicas)
        return dict(sorted(shares.items()))
