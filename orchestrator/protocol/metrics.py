"""Figures that a strategy reports of itself, and how those of several ranks become one. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Figure:
    """A rank's figure; ``over_ranks`` says what the run's is."""

    value: float
    over_ranks: Literal["sum", "mean", "max"]


def of_the_run(figures: Iterable[Figure]) -> float:
    """One figure of several ranks'."""
    found = list(figures)
    values = [f.value for f in found]
    match found[0].over_ranks:
        case "sum":
            return math.fsum(values)
        case "mean":
            return statistics.fmean(values)
        case "max":
            return max(values)
