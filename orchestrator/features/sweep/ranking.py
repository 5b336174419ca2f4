"""Which of several runs is the best, by the metric that they are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.display.comparison import ComparedRun
from orchestrator.protocol.core_metrics import LOSS

_LOSS = LOSS.summaries[0].key
_EQUAL = 1e-3
"""Relative difference below which results count as equal."""


@dataclass(frozen=True)
class Ranking:
    """By which result runs are compared.

    Attributes:
        name: in words.
        key: in the summary of a run.
        values: the result of each run that has it, by location.
    """

    name: str
    key: str
    values: Mapping[str, float]
    maximize: bool

    @property
    def is_tie(self) -> bool:
        """Whether the results count as equal."""
        values = self.values.values()
        return max(values) - min(values) <= _EQUAL * max(map(abs, values))


def ranking(runs: Sequence[ComparedRun]) -> Ranking | None:
    """Return how the runs that have finished compare; None without several.

    Their metric is ``checkpoint.best``, but ``sweep.metric`` in a search and without it. If some lack these, it is the
    loss.
    """
    finished = [run for run in runs if run.state == "finished"]
    params = finished[0].params if finished else {}
    best, metric = params.get("checkpoint.best"), str(params.get("sweep.metric"))
    found = [(metric, metric, params.get("sweep.direction") == "maximize")]
    if best is not None and params.get("sweep.trials") is None:
        found.insert(0, (best, f"best_{best}".replace("/", "_"), params.get("checkpoint.best_direction") == "maximize"))
    for name, key, maximize in (*found, ("loss", _LOSS, False)):
        values = {run.location: value for run in finished if (value := run.value(key)) is not None}
        if len(values) > 1 and (key == _LOSS or len(values) == len(finished)):
            return Ranking(name, key, values, maximize)
    return None
