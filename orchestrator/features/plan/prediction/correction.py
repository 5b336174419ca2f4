"""Predicted step times, corrected by measured ones of the same job on the same devices. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from orchestrator.features.plan.prediction.cost import StepTime

_EXCHANGED = ("shard", "replicate", "tensor", "context", "expert")
_DOUBT = 0.05
"""How much a factor is held back to 1, so that what a step has little of changes little."""
_LEAST = 0.01
"""The smallest step of the search for a factor, as a logarithm."""


@dataclass(frozen=True)
class Correction:
    """Factors of what the parts of a step take.

    Attributes:
        computing: of computation, also that of other stages which a stage waits for.
        exchanging: of collectives.
        staging: of what stages send.
    """

    computing: float = 1.0
    exchanging: float = 1.0
    staging: float = 1.0

    def seconds(self, time: StepTime) -> float:
        """Return the seconds of a step."""
        exchanged = math.fsum(getattr(time, name) for name in _EXCHANGED)
        computed = time.total - exchanged - time.sends
        return self.computing * computed + self.exchanging * exchanged + self.staging * time.sends


def correction(measured: Sequence[tuple[StepTime, float]]) -> Correction:
    """Return the factors with which steps are predicted nearest to their measured seconds, by relative errors."""

    def distance(logs: Sequence[float]) -> float:
        found = Correction(*map(math.exp, logs))
        errors = math.fsum(math.log(found.seconds(time) / seconds) ** 2 for time, seconds in measured)
        return errors + _DOUBT * math.fsum(log**2 for log in logs)

    logs, step = [0.0] * len(fields(Correction)), 1.0
    while step > _LEAST:
        tried = [
            [log + change * (i == place) for i, log in enumerate(logs)]
            for place in range(len(logs))
            for change in (-step, step)
        ]
        best = min(tried, key=distance)
        if distance(best) < distance(logs):
            logs = best
        else:
            step /= 2
    return Correction(*map(math.exp, logs))
