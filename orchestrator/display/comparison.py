"""A table of runs side by side, from their run directories. Imports neither MLflow nor torch."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from orchestrator.display.text import bar, first_few, format_value, plain_table, render, takes_unicode
from orchestrator.protocol.core_metrics import CORE_METRICS, SAMPLES_PER_S
from orchestrator.protocol.metrics import Column, MetricRegistry, MetricSpec, Summary, from_record, summary_value
from orchestrator.records.run_dir import RunDir

_RATE = SAMPLES_PER_S.summaries[0].key
_BAR_WIDTH = 10
_SHORTEST_NAME = 12
_WIDEST = 1000
_WIDTH_WITHOUT_TERMINAL = 160


class CompareError(Exception):
    """There are no runs, or one cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its directory describes it.

    ``work`` is equal for runs of the same job with the same fields. ``metrics`` are those that the run declares.
    """

    path: Path
    state: str
    strategy: str
    job: str
    work: str
    workers: int | None
    summary: Mapping[str, Any]
    metrics: tuple[MetricSpec, ...] = ()

    def value(self, key: str) -> float | None:
        """Return the number under ``key`` of the summary; None if there is none or it is not finite."""
        return summary_value(self.summary, key)


def read_run(path: Path) -> Run:
    """Read ``run.json`` of the run directory ``path``.

    Raises:
        CompareError: it is missing or not readable.
    """
    file = RunDir(path).record_file
    try:
        record = json.loads(file.read_text())
    except FileNotFoundError:
        raise CompareError(f"{path}: not a run directory, it has no run.json") from None
    except (OSError, ValueError) as e:
        raise CompareError(f"{file}: not readable: {e}; leave this run out or remove it") from None
    if not isinstance(record, dict):
        raise CompareError(f"{file}: not readable: not a JSON object; leave this run out or remove it")
    return Run(
        path=path.resolve(),
        state=str(record.get("state") or "-"),
        strategy=str(record.get("strategy") or "-"),
        job=str(record.get("job") or "-"),
        work=_work(record),
        workers=_workers(record.get("plan")),
        summary=record.get("summary") or {},
        metrics=_metrics(record.get("metrics")),
    )


def _metrics(records: object) -> tuple[MetricSpec, ...]:
    """The metrics that the run declares; none for a directory from before ``run.json`` had them."""
    found = [from_record(record) for record in records] if isinstance(records, list) else []
    return tuple(spec for spec in found if spec is not None)


def _work(record: Mapping[str, Any]) -> str:
    params = record.get("params")
    fields = {k: v for k, v in params.items() if k.startswith("job.")} if isinstance(params, Mapping) else {}
    return json.dumps([record.get("job"), fields], sort_keys=True)


def _workers(plan: object) -> int | None:
    mesh = plan.get("mesh") if isinstance(plan, Mapping) else None
    if not isinstance(mesh, Mapping):
        return None
    return int(mesh.get("data_parallel_size", 1)) * int(mesh.get("pipeline_parallel_size", 1))


def labels(runs: Sequence[Run]) -> list[str]:
    """Return short names that distinguish the runs: strategy and workers, job and time only if necessary."""
    jobs = {run.job for run in runs}
    short = []
    for run in runs:
        workers = f" x{run.workers}" if run.workers else ""
        short.append(run.strategy + workers + (f" {run.job}" if len(jobs) > 1 else ""))
    repeated = Counter(short)
    return [
        f"{text}, {_time_of_day(run.path.name)}" if repeated[text] > 1 else text
        for text, run in zip(short, runs, strict=True)
    ]


def _time_of_day(name: str) -> str:
    match = re.match(r"(\d\d)-(\d\d)-(\d\d)-", name)
    return ":".join(match.groups()) if match else name


def baseline(runs: Sequence[Run], work: str) -> Run | None:
    """Return the run of the same work that speeds are relative to: the first ``single`` one, else the first.

    Only runs with a throughput count; None if there is none.
    """
    measured = [run for run in runs if run.work == work and run.value(_RATE)]
    single = [run for run in measured if run.strategy == "single"]
    return next(iter(single or measured), None)


def relative_speed(run: Run, runs: Sequence[Run]) -> float | None:
    """Return the throughput of ``run`` relative to that of its :func:`baseline`; None if either is unknown."""
    base = baseline(runs, run.work)
    speed, base_speed = run.value(_RATE), base and base.value(_RATE)
    return speed / base_speed if speed and base_speed else None


def table(runs: Sequence[Run]) -> str:
    """Return a table with one row per run.

    A narrow terminal first shortens the names of runs, then leaves out columns, which a line below names.
    """
    unicode = takes_unicode(sys.stdout)
    width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns
    columns = _columns(runs, unicode=unicode)
    dispensable = sorted((c for c in columns if c.priority is not None), key=lambda c: c.priority or 0)
    omitted: list[str] = []
    name_width = 0
    longest = max(len(run.path.name) for run in runs)
    for column in (None, *dispensable):
        if column is not None:
            columns.remove(column)
            omitted.append(column.heading or column.name)
        grid = _grid(columns, longest, unicode=unicode)
        needed = Console(width=_WIDEST).measure(grid).maximum
        name_width = longest - max(0, needed - width)
        if name_width >= min(longest, _SHORTEST_NAME):
            break
    lines = [render(_grid(columns, max(name_width, _SHORTEST_NAME), unicode=unicode), width=_WIDEST)]
    names = dict(zip((run.path for run in runs), labels(runs), strict=True))
    shared = [work for work, number in Counter(run.work for run in runs).items() if number > 1]
    bases = [names[base.path] for work in shared if (base := baseline(runs, work))]
    if bases:
        lines.append(f"speed: relative to {first_few(bases)}" + (", of the same job" if len(bases) > 1 else ""))
    if omitted:
        lines.append(f"columns left out: {first_few(omitted)}")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of the table with the cell of each run.

    ``name`` identifies a column without a heading. For ``priority`` see
    :class:`~orchestrator.protocol.metrics.Column`.
    """

    heading: str
    cells: Sequence[str]
    name: str = ""
    justify: Literal["left", "right"] = "right"
    priority: int | None = None


def _columns(runs: Sequence[Run], *, unicode: bool) -> list[_Column]:
    """The columns in their order: what a run is, its metrics, its start-up and restarts."""
    columns = [
        _Column(heading="run", justify="left", cells=[run.path.name for run in runs]),
        _Column(heading="state", justify="left", priority=4, cells=[run.state.lower() for run in runs]),
    ]
    if len({run.job for run in runs}) > 1:
        columns.append(_Column(heading="job", justify="left", priority=3, cells=[run.job for run in runs]))
    columns += [
        _Column(heading="strategy", justify="left", cells=[run.strategy for run in runs]),
        _Column(heading="workers", cells=[str(run.workers or "-") for run in runs]),
    ]
    for spec, summary, column in _declared_columns(runs):
        cells = [_cell(run, summary.key, spec.format, beside=column.beside) for run in runs]
        columns.append(_Column(heading=column.heading, priority=column.priority, cells=cells))
        if spec is SAMPLES_PER_S:
            columns += _speed_columns(runs, unicode=unicode)
    return [
        *columns,
        _Column(heading="start-up s", priority=2, cells=[_cell(run, "startup_s", "{:.1f}") for run in runs]),
        _Column(heading="restarts", priority=1, cells=[_cell(run, "restarts", "{:.0f}") for run in runs]),
    ]


def _declared_columns(runs: Sequence[Run]) -> list[tuple[MetricSpec, Summary, Column]]:
    """The columns that the metrics of the runs declare, without those that are optional and empty."""
    registry = MetricRegistry(CORE_METRICS)
    for run in runs:
        for spec in run.metrics:
            registry.add(spec)
    declared = [(spec, s, s.column) for spec in registry for s in spec.summaries if s.column is not None]
    shown = [d for d in declared if d[2].always or any(run.value(d[1].key) is not None for run in runs)]
    return sorted(shown, key=lambda d: d[2].position)


def _cell(run: Run, key: str, template: str, *, beside: str | None = None) -> str:
    value, second = run.value(key), run.value(beside or key)
    if value is None or second is None:
        return "-"
    text = format_value(value, template)
    return text if beside is None else f"{text} ({format_value(second, template)})"


def _speed_columns(runs: Sequence[Run], *, unicode: bool) -> list[_Column]:
    """A bar for the throughput of each run, and its relative speed."""
    rates = [run.value(_RATE) for run in runs]
    most = max((r or 0.0 for r in rates), default=0.0)
    bars = [bar(r / most, width=_BAR_WIDTH, unicode=unicode) if r and most else "" for r in rates]
    speeds = [relative_speed(run, runs) for run in runs]
    return [
        _Column(heading="", name="bar", justify="left", priority=8, cells=bars),
        _Column(heading="speed", cells=[f"{speed:.2f}x" if speed else "-" for speed in speeds]),
    ]


def _grid(columns: Sequence[_Column], name_width: int, *, unicode: bool) -> Table:
    """The table, with the names of runs cut to ``name_width`` characters."""
    grid = plain_table(unicode=unicode)
    for column in columns:
        grid.add_column(column.heading, justify=column.justify, no_wrap=True)
    for name, *others in zip(*(column.cells for column in columns), strict=True):
        cut = name[: max(1, name_width - 1)] + ("…" if unicode else "~") if len(name) > name_width else name
        grid.add_row(cut, *others)
    return grid
