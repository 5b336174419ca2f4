"""The best evaluation of a run so far: which one it is, and whether it is so old that the run ends. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
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
        last_step: the step of the last evaluation.
        last_value: its value; None if it is not finite.
    """

    metric: str
    direction: Literal["minimize", "maximize"]
    step: int = 0
    value: float | None = None
    bar: float | None = None
    evaluations_since: int = 0
    last_step: int = 0
    last_value: float | None = None

    @property
    def followed(self) -> tuple[str, str]:
        """The metric, and which of its values are better."""
        return self.metric, self.direction

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
        found = replace(self, last_step=step, last_value=value if math.isfinite(value) else None)
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
        if self.value is None:
            found = "none was finite" if self.bar is None else "the checkpoint of its best could not be saved"
        else:
            found = f"its best is {self.value:.4g} at step {self.step}"
        times = "evaluation" if stop_after == 1 else f"{stop_after} evaluations"
        return f"train.stop_after={stop_after}: {self.metric} has not improved in the last {times}; {found}"

    def among(self, steps: Collection[int], at: Callable[[int], BestSoFar | None]) -> BestSoFar:
        """Return this with the best evaluation of those after ``steps``; with none if none of them is known.

        With no value yet, it is the best one that an earlier part of the run has saved.

        Args:
            steps: those of which there is a checkpoint.
            at: returns what the checkpoint of a step has of this kind; called only if that of ``step`` is not there.
        """
        if self.step in steps and self.value is not None:
            return self
        found = [(value, step) for step in steps if (value := self._value_at(step, at(step))) is not None]
        sign = 1 if self.direction == "minimize" else -1
        value, step = min(found, key=lambda one: (sign * one[0], one[1]), default=(None, 0))
        return replace(self, step=step, value=value)

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

    def _value_at(self, step: int, seen: BestSoFar | None) -> float | None:
        """Return the value of the evaluation after ``step``, at which this was ``seen``; None if it is not known."""
        if seen is None or seen.followed != self.followed:
            return None
        if seen.step == step:
            return seen.value
        return seen.last_value if seen.last_step == step else None

    def _gain(self, before: float, value: float) -> float:
        return before - value if self.direction == "minimize" else value - before


def best_steps(bests: Mapping[int, BestSoFar | None], newest: BestSoFar | None = None) -> set[int]:
    """Return the steps of the best checkpoints, one for each metric that any part of the run has followed.

    Args:
        bests: what the checkpoint of each step says of the best evaluation up to it.
        newest: the best evaluation so far, if a checkpoint that is not among them says so.
    """
    followed = {best.followed: best for _, best in sorted(bests.items()) if best is not None}
    if newest is not None:
        followed[newest.followed] = newest
    return {best.among(bests, bests.get).step for best in followed.values()}
