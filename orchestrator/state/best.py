"""The best evaluation of a run so far: which one it is, and whether it is so old that the run ends. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

BEST = "best"
"""The key in a checkpoint's metadata of the best evaluation up to its step."""


@dataclass(frozen=True, kw_only=True)
class BestSoFar:
    """The best evaluation by ``metric`` up to some step.

    Attributes:
        metric: the name of the metric.
        direction: which of its values are better.
        step: the step of the best evaluation; 0 if none has had a finite value.
        value: its value; None if there is none.
        bar: the value that the last improvement by more than ``train.stop_min_delta`` has reached.
        evaluations_since: evaluations since that improvement.
        last_step: the step of the last evaluation.
    """

    metric: str
    direction: Literal["minimize", "maximize"]
    step: int = 0
    value: float | None = None
    bar: float | None = None
    evaluations_since: int = 0
    last_step: int = 0

    @property
    def of_average(self) -> bool:
        """Whether ``metric`` is one of the moving average of the weights, of ``train.ema_decay``."""
        return self.metric.partition("/")[2].startswith("ema_")

    def after(self, step: int, value: float, *, min_delta: float) -> BestSoFar:
        """Return the best evaluation after the one of ``step``, which has this ``value``. NaN is never better.

        An evaluation that is repeated after a failure counts once.
        """
        if step <= self.last_step:
            return self
        since = self.evaluations_since + 1
        found = replace(self, last_step=step)
        if not math.isfinite(value):
            return replace(found, evaluations_since=since)
        if self.value is None or self._gain(self.value, value) > 0:
            found = replace(found, step=step, value=value)
        if self.bar is None or self._gain(self.bar, value) > min_delta:
            return replace(found, bar=value, evaluations_since=0)
        return replace(found, evaluations_since=since)

    def why_stop(self, stop_after: int | None) -> str | None:
        """Return why the run ends early; None if it goes on. ``stop_after``: the value of ``train.stop_after``."""
        if stop_after is None or self.evaluations_since < stop_after:
            return None
        found = "none was finite" if self.value is None else f"its best is {self.value:.4g} at step {self.step}"
        times = "evaluation" if stop_after == 1 else f"{stop_after} evaluations"
        return f"train.stop_after={stop_after}: {self.metric} has not improved in the last {times}; {found}"

    def to_json(self) -> dict[str, Any]:
        """Return this as values for the metadata of a checkpoint."""
        return asdict(self)

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> BestSoFar | None:
        """Return the best evaluation in the metadata of a checkpoint; None if there is none."""
        try:
            return cls(**meta[BEST])
        except (KeyError, TypeError):
            return None

    def _gain(self, before: float, value: float) -> float:
        return before - value if self.direction == "minimize" else value - before


def best_step(meta: Mapping[str, Any]) -> int | None:
    """Return the step of the best evaluation by the metadata of a checkpoint, None if there is none."""
    best = BestSoFar.from_meta(meta)
    return None if best is None or best.value is None else best.step
