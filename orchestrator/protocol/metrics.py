"""Figures that a strategy reports of itself, and how those of several ranks become one. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """A rank's figure; ``reduce`` says what the run's is."""

    value: float
    reduce: Literal["sum", "mean", "max"]


def reduce_over_ranks(figures: Iterable[Metric]) -> float:
    """One figure of several ranks'."""
    found = list(figures)
    values = [f.value for f in found]
    match found[0].reduce:
        case "sum":
            return math.fsum(values)
        case "mean":
            return statistics.fmean(values)
        case "max":
            return max(values)
