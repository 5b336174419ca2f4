"""The values that a metric has had in a run, in bounded memory. Pure."""

from __future__ import annotations

import math
import random
import statistics
from array import array
from collections.abc import Iterable, Sequence
from typing import Literal

MOST_KEPT = 16384
"""Keep all values up to this number, and beyond it a random sample of so many."""


class RunningValues:
    """Summarises all values so far.

    The harmonic mean is exact. The percentiles are exact for up to :data:`MOST_KEPT` values. Beyond that, each value is
    equally likely to be in the sample (reservoir sampling). In 997 of 1,000 cases, the returned median is then between
    the percentiles 48.8 and 51.2, and the returned 95th percentile is between 94.5 and 95.5. The generator has a fixed
    seed, so equal values give equal summaries.
    """

    def __init__(self) -> None:
        self._kept = array("d")
        self._count = 0
        self._least = math.inf
        self._inverse_sum = 0.0
        self._random = random.Random(0)

    def extend(self, values: Iterable[float]) -> None:
        """Add values, oldest first."""
        for value in values:
            self._count += 1
            self._least = min(self._least, value)
            self._inverse_sum += 1 / value if value else 0.0
            if self._count <= MOST_KEPT:
                self._kept.append(value)
            elif (place := self._random.randrange(self._count)) < MOST_KEPT:
                self._kept[place] = value

    def derive(self, how: Literal["median", "p95", "harmonic_mean"]) -> float | None:
        """Return one value for the summary; None if there are no values."""
        if not self._kept:
            return None
        match how:
            case "median":
                return statistics.median(self._kept)
            case "p95":
                return percentile(self._kept, 0.95)
            case "harmonic_mean":  # of the rates of equal amounts of work: the rate of all the work
                return self._count / self._inverse_sum if self._least > 0 else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` (0 to 1) of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
