"""The choice among the contenders. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.tuning.predict import Prediction


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A proposal and what is known about it.

    Attributes:
        overrides: the strategy and its keys, as typed on the command line.
        prediction: None if the proposal was refused, or the job cannot be predicted.
        refused: why it cannot be trained; empty if it can.
        measured_ms: the median time of its steps; None if it was not measured.
    """

    overrides: tuple[str, ...]
    prediction: Prediction | None = None
    refused: str = ""
    measured_ms: float | None = None

    @property
    def name(self) -> str:
        """The overrides without the name of their section."""
        return " ".join(o.removeprefix("strategy=").removeprefix("strategy.") for o in self.overrides)

    @property
    def predicted_ms(self) -> float:
        """The predicted time of a step; infinite if there is no prediction."""
        return math.inf if self.prediction is None else self.prediction.step_ms

    @property
    def error(self) -> float | None:
        """The relative error of the prediction; None if it was not made, or not put to the test."""
        if self.prediction is None or self.measured_ms is None:
            return None
        return self.predicted_ms / self.measured_ms - 1


def next_to_measure(contenders: Sequence[Contender], least: int) -> int | None:
    """Return the index of the contender to measure next; None if enough are measured, or none is left.

    The order is that of their predictions. At least ``least`` are measured, and then each that is predicted to be
    faster than the best of those. If there are no predictions, and ``least`` is not 0, all are measured.
    """
    valid = [(i, c) for i, c in enumerate(contenders) if not c.refused]
    left = [(i, c) for i, c in valid if c.measured_ms is None]
    if not left or not least:
        return None
    measured = [c.measured_ms for _, c in valid if c.measured_ms is not None]
    index, candidate = min(left, key=lambda pair: pair[1].predicted_ms)
    may_be_best = candidate.prediction is None or candidate.predicted_ms < min(measured, default=math.inf)
    return index if len(measured) < least or may_be_best else None


def best(contenders: Sequence[Contender]) -> Contender | None:
    """Return the contender with the shortest measured step, or else the shortest predicted one; None if all refused."""
    valid = [c for c in contenders if not c.refused]
    measured = [(c.measured_ms, c) for c in valid if c.measured_ms is not None]
    if measured:
        return min(measured, key=lambda pair: pair[0])[1]
    return min(valid, key=lambda c: c.predicted_ms, default=None)


def reason(contenders: Sequence[Contender]) -> str:
    """Return why the best contender is the best, in one sentence."""
    winner = best(contenders)
    assert winner is not None
    others = [c for c in contenders if not c.refused and c is not winner]
    if not others:
        return "no other strategy can train this job here"
    rivals = [c for c in others if c.measured_ms is not None]
    if winner.measured_ms is None or not rivals:
        rival = min(others, key=lambda c: c.predicted_ms)
        own_ms, rival_ms, how = winner.predicted_ms, rival.predicted_ms, "predicted"
    else:
        rival = min(rivals, key=lambda c: c.measured_ms or math.inf)
        own_ms, rival_ms, how = winner.measured_ms, rival.measured_ms or math.inf, "measured"
    if own_ms == math.inf:
        return "it is the first that fits; this job cannot be predicted, and nothing was measured"
    gain = f"{own_ms:.4g} ms per step ({how}), {rival_ms / own_ms:.2f} times as fast as {rival.name}"
    if rival.prediction is None:
        return gain
    parts = {
        "compute": rival.prediction.compute_ms,
        "the exchange of gradients": rival.prediction.exchange_ms,
        "waiting for other stages": rival.prediction.idle_ms,
    }
    largest = max(parts, key=lambda part: parts[part])
    return f"{gain}, which spends {parts[largest] / rival.prediction.step_ms:.0%} of a step on {largest}"
