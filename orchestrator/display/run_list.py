"""The list of runs: one line each, with state, step, speed, loss and age; and the queue of a cluster as a table."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from orchestrator.config.text import first_few
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
from orchestrator.protocol.queue_entries import QueueEntry

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


def queue_table(entries: Sequence[QueueEntry], *, now: float) -> str:
    """Return a table with one row per run.

    Args:
        entries: the runs with workers, then those in the line, in its order, and then the unfit ones.
        now: seconds since the epoch, for the time that a run has been in its state.
    """
    numbers = itertools.count(1)
    places = ["-" if e.has_workers or e.state == "unfit" else str(next(numbers)) for e in entries]
    columns = [
        TableColumn(heading="place", cells=places),
        TableColumn(heading="state", justify="left", cells=[e.state for e in entries]),
        TableColumn(heading="priority", cells=[str(e.priority) for e in entries]),
        TableColumn(heading="run", justify="left", cells=["/".join(e.location.split("/")[-2:]) for e in entries]),
        TableColumn(heading="id", justify="left", cells=[e.id for e in entries]),
        TableColumn(heading="user", justify="left", cells=[f"{e.user} on {e.host}" for e in entries]),
        TableColumn(heading="needs", justify="left", cells=[_needs(e) for e in entries]),
        TableColumn(heading="since", cells=[duration(max(0.0, now - e.since), whole=True) for e in entries]),
    ]
    return "\n".join(text_lines(columns, unicode=takes_unicode(sys.stdout)))


def order_notes(entries: Sequence[QueueEntry]) -> list[str]:
    """Return one line for each run that is not in the order of priority and submission; the arguments as above."""
    waiting = {e.uid: e.name for e in entries if e.state in ("waiting", "reserving")}
    lines = []
    for entry in entries:
        if overtaken := [waiting[uid] for uid in entry.overtook if uid in waiting]:
            lines.append(
                f"{entry.name} ({entry.state}): it has overtaken {first_few(overtaken)}, and makes room as soon as "
                "the first in the line could start with its resources"
            )
        if entry.over_share:
            lines.append(
                f"{entry.name} ({entry.state}): it goes behind the runs of others, because the runs of {entry.user} "
                f"have their share already (cluster.user_share={entry.user_share:g})"
            )
    return lines


def _needs(entry: QueueEntry) -> str:
    """The resources that a run has, or needs at least."""
    workers = sum(entry.workers_by_node.values()) or entry.workers
    each = f"{entry.cpus_per_worker:g} CPU" + (f" and {entry.gpus_per_worker:g} GPU" if entry.gpus_per_worker else "")
    return f"{workers} x {each}"
