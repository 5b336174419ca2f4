"""The list of runs: one line each, with state, step, speed, loss and age."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import Any

from orchestrator.display.comparison import FINAL_LOSS, RATE, ComparedRun
from orchestrator.display.plain_text import (
    TableColumn,
    duration,
    number,
    rate,
    takes_unicode,
    text_lines,
    without_least,
)

_WIDTH_WITHOUT_TERMINAL = 160


def run_list(runs: Sequence[ComparedRun], *, now: float) -> str:
    """Return a table with one row per run. A narrow terminal leaves out columns.

    Args:
        runs: in the order of the rows. Their names are those by which other commands find them.
        now: seconds since the epoch, for the ages.
    """
    settings = [TableColumn(heading="settings", justify="left", priority=7, cells=[run.settings for run in runs])]
    if not any(run.settings for run in runs):
        settings = []
    columns = [
        TableColumn(heading="run", justify="left", cells=[run.name for run in runs]),
        TableColumn(heading="state", justify="left", cells=[run.state for run in runs]),
        TableColumn(heading="strategy", justify="left", priority=3, cells=[run.strategy for run in runs]),
        TableColumn(heading="workers", priority=1, cells=[str(run.workers or "-") for run in runs]),
        TableColumn(heading="job", justify="left", priority=2, cells=[run.job for run in runs]),
        *settings,
        TableColumn(heading="step", priority=4, cells=[_step(run) for run in runs]),
        TableColumn(heading="samples/s", priority=4, cells=[_cell(run.value(RATE), rate) for run in runs]),
        TableColumn(heading="loss", priority=5, cells=[_cell(run.value(FINAL_LOSS), number) for run in runs]),
        TableColumn(heading="age", priority=6, cells=[_age(run, now) for run in runs]),
    ]
    width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns
    return "\n".join(text_lines(without_least(columns, width), unicode=takes_unicode(sys.stdout)))


def plain(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Return the values of the list for other programs."""
    return [
        {
            "run": run.name,
            "location": run.location,
            "state": run.state,
            "strategy": run.strategy,
            "workers": run.workers,
            "job": run.job,
            "settings": run.settings,
            "step": run.value("steps"),
            RATE: run.value(RATE),
            FINAL_LOSS: run.value(FINAL_LOSS),
            "started": run.started,
        }
        for run in runs
    ]


def _cell(value: float | None, text: Any) -> str:
    return "-" if value is None else str(text(value))


def _step(run: ComparedRun) -> str:
    step, steps = run.value("steps"), None if run.strategy == "script" else run.params.get("train.steps")
    return "-" if step is None else f"{step:.0f}/{steps}" if steps else f"{step:.0f}"


def _age(run: ComparedRun, now: float) -> str:
    if run.started is None:
        return "-"
    days = int((now - run.started) // 86400)
    return f"{days}d" if days else duration(max(0.0, now - run.started), whole=True)
