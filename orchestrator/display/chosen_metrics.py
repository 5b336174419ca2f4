"""The metrics that a user has chosen, by ``checkpoint.best`` and ``display.metrics``, and their best evaluations.

Without ``display.metrics``, the metrics of the user's own are chosen as long as they are few.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.config.eval_splits import VAL, metric_prefix
from orchestrator.config.schema import Config
from orchestrator.config.text import first_few
from orchestrator.display.plain_text import format_value, number
from orchestrator.protocol.core_metrics import CORE_METRICS, VAL_LOSS
from orchestrator.protocol.metrics import MetricRegistry

_SMALL_IS_GOOD = ("loss", "perplexity", "error")
_FEW = 3
_OURS = {spec.name for spec in CORE_METRICS}


class ChosenMetrics:
    """What is known of the chosen metrics, updated by what a run logs; its size is bounded by the improvements.

    The best evaluation by ``checkpoint.best`` is the one that the workers report. Of other metrics, nobody says which
    values are better: their lowest is told if they are a loss, a perplexity or an error, otherwise their highest.

    Args:
        named: the value of ``display.metrics``.
        best: the value of ``checkpoint.best``.
        splits: the value of ``train.eval_splits``.
    """

    def __init__(self, named: Sequence[str] = (), *, best: str | None = None, splits: Sequence[str] = (VAL,)):
        self._chosen = tuple(dict.fromkeys((*([] if best is None else [best]), *named)))
        self._own: dict[str, None] = {}
        self.best: tuple[int, float] | None = None
        self._best_name = best
        self._named = named
        self._prefixes = tuple(metric_prefix(split) for split in splits)
        self._latest: dict[str, float] = {}
        self._extremes: dict[str, list[tuple[int, float]]] = {}
        self._known: dict[str, None] = {}
        self._evaluated_at: int | None = None
        self._warned: set[str] = set()
        self._warning: str | None = None

    @classmethod
    def of(cls, config: Config) -> ChosenMetrics:
        """Return those that ``config`` names."""
        return cls(config.display.metrics, best=config.checkpoint.best, splits=config.train.eval_splits)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def names(self) -> list[str]:
        """The chosen metrics, and those that the evaluations of the user have, if they are few."""
        own = [name for name in self._own if name not in self._chosen]
        return [*self._chosen, *(own if len(own) <= _FEW and not self._named else [])]

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation by ``checkpoint.best``, or of the lowest validation loss; None before one."""
        if self._best_name is not None:
            return None if self.best is None else self.best[0]
        found = self._extremes.get(VAL_LOSS.name)
        return found[-1][0] if found else None

    def is_evaluation(self, metrics: Iterable[str]) -> bool:
        """Return whether a point with these metrics is of an evaluation."""
        return any(name.startswith(self._prefixes) for name in metrics)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take note of what was logged at ``step``."""
        if self._evaluated_at is not None and step > self._evaluated_at:  # a script may log one metric after another
            self._find_missing(name for name in self._named if name.startswith(self._prefixes))
        if self._evaluated_at is None and self.is_evaluation(metrics):
            self._evaluated_at = step
        self._known.update(dict.fromkeys(metrics))
        evaluated = (name for name in metrics if name.startswith(self._prefixes) and name not in _OURS)
        self._own.update(dict.fromkeys(name for name in evaluated if "loss" not in name))
        for name in {*self.names, VAL_LOSS.name}:
            if (value := metrics.get(name)) is None:
                continue
            self._latest[name] = value
            found = self._extremes.setdefault(name, [])
            sign = 1 if name.endswith(_SMALL_IS_GOOD) else -1
            if math.isfinite(value) and (not found or sign * value < sign * found[-1][1]):
                found.append((step, value))

    def look_back(self, points: Iterable[tuple[int, float, Mapping[str, float]]], *, up_to_step: int) -> None:
        """Take note of what earlier launches have logged: the step, the time and the metrics of each point."""
        for step, _, metrics in points:
            if step <= up_to_step:
                self.add(step, metrics)

    def go_back(self, step: int) -> None:
        """Forget what was logged after ``step``: the run repeats it."""
        if self.best is not None and self.best[0] > step:
            self.best = None
        for found in self._extremes.values():
            while found and found[-1][0] > step:
                found.pop()

    def end(self) -> None:
        """Take note of the end of the run."""
        if self._known:
            self._find_missing(self._named)

    def take_warning(self) -> str | None:
        """Return a warning about names that the run has not logged, once for each name; None if there is none."""
        warning, self._warning = self._warning, None
        return warning

    def texts(
        self, values: Mapping[str, float], registry: MetricRegistry, *, with_best: bool = False
    ) -> dict[str, str]:
        """Return the text of each chosen metric of ``values`` by its name: ``val/f1 0.913``.

        ``with_best``: with the best evaluation, as in ``val/f1 0.913 (best 0.92 at step 300)``.
        """
        texts = {}
        for name in self.names:
            if name in values:
                form = registry[name].format if name in registry else "number"
                best = self._best(name) if with_best else None
                texts[name] = f"{name} {format_value(values[name], form)}" + ("" if best is None else f" ({best})")
        return texts

    def summary(self) -> str:
        """Return the last values and the best evaluations in a line for the verdict; empty if nothing was logged."""
        parts = []
        for name in self.names:
            best = self._best(name)
            if name == self._best_name:
                parts += [] if self.best is None else [f"best {name} {number(self.best[1])} at step {self.best[0]}"]
            elif name in self._latest:
                parts.append(f"{name} {number(self._latest[name])}" + ("" if best is None else f" ({best})"))
        return "; ".join(parts)

    def _best(self, name: str) -> str | None:
        if name == self._best_name:
            return None if self.best is None else f"best {number(self.best[1])} at step {self.best[0]}"
        if not name.startswith(self._prefixes) or not (found := self._extremes.get(name)):
            return None
        step, value = found[-1]
        return f"{'lowest' if name.endswith(_SMALL_IS_GOOD) else 'highest'} {number(value)} at step {step}"

    def _find_missing(self, names: Iterable[str]) -> None:
        missing = [name for name in names if name not in self._known and name not in self._warned]
        if not missing:
            return
        self._warned.update(missing)
        are_evaluated = all(name.startswith(self._prefixes) for name in missing)
        there = sorted(name for name in self._known if not are_evaluated or name.startswith(self._prefixes))
        what = "no evaluation has" if are_evaluated else "the run has not logged"
        known = f"there are {first_few(there, most=20)}" if there else "there are no others"
        self._warning = f"display.metrics: {what} {' and '.join(missing)}; {known}"
