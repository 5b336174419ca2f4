"""Runs side by side: what their directories say, as a table.

Reads files alone: neither MLflow nor torch is imported.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from orchestrator.display.report import bar, figure, first_few, plain_table, rate, render, takes_unicode
from orchestrator.records.run_dir import RunDir

_BAR_WIDTH = 10
_LEAST_WANTED = ("restarts", "start-up s", "job", "state", "p95 ms", "p50 ms", "val acc", "bar", "bubble (theory)")
_SHORTEST_NAME = 12
_WIDEST = 1000
_WIDTH_WITHOUT_TERMINAL = 160


class CompareError(Exception):
    """There is nothing to compare, or a run cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run directory says; a figure that it does not have is None.

    ``work`` is equal where the same job was done, with the same fields.
    """

    path: Path
    state: str
    strategy: str
    job: str
    work: str
    workers: int | None
    summary: Mapping[str, Any]

    def figure(self, name: str) -> float | None:
        value = self.summary.get(name)
        if isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
        return None


def read_run(path: Path) -> Run:
    """Read ``run.json`` of the run directory ``path``.

    Raises:
        CompareError: it is missing or not readable.
    """
    file = RunDir(path).record_file
    try:
        record = json.loads(file.read_text())
    except FileNotFoundError:
        raise CompareError(f"{path}: no run directory, it has no run.json") from None
    except (OSError, ValueError) as e:
        raise CompareError(f"{file}: not readable: {e}; leave this run out or remove it") from None
    if not isinstance(record, dict):
        raise CompareError(f"{file}: not readable: not a JSON object; leave this run out")
    return Run(
        path=path.resolve(),
        state=str(record.get("state") or "-"),
        strategy=str(record.get("strategy") or "-"),
        job=str(record.get("job") or "-"),
        work=_work(record),
        workers=_workers(record.get("plan")),
        summary=record.get("summary") or {},
    )


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
    """Short names that tell the runs apart: strategy and workers, and more only where needed."""
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
    """What speeds are relative to: of the same work the first ``single`` run with a throughput, else the first."""
    measured = [run for run in runs if run.work == work and run.figure("samples_per_s")]
    single = [run for run in measured if run.strategy == "single"]
    return next(iter(single or measured), None)


def relative_speed(run: Run, runs: Sequence[Run]) -> float | None:
    base = baseline(runs, run.work)
    speed, base_speed = run.figure("samples_per_s"), base and base.figure("samples_per_s")
    return speed / base_speed if speed and base_speed else None


def table(runs: Sequence[Run]) -> str:
    """The runs, one a row.

    In a narrow terminal names of runs are cut first, then columns left out and named below.
    """
    unicode = takes_unicode(sys.stdout)
    width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns
    columns = _columns(runs, unicode=unicode)
    left_out: list[str] = []
    room = 0
    longest = max(len(run.path.name) for run in runs)
    for name in (None, *_LEAST_WANTED):
        if name in columns:
            del columns[name]
            left_out.append(name)
        grid = _grid(runs, columns, longest, unicode=unicode)
        needed = Console(width=_WIDEST).measure(grid).maximum
        room = longest - max(0, needed - width)
        if room >= min(longest, _SHORTEST_NAME):
            break
    lines = [render(_grid(runs, columns, max(room, _SHORTEST_NAME), unicode=unicode), width=_WIDEST)]
    names = dict(zip((run.path for run in runs), labels(runs), strict=True))
    shared = [work for work, number in Counter(run.work for run in runs).items() if number > 1]
    bases = [names[base.path] for work in shared if (base := baseline(runs, work))]
    if bases:
        lines.append(f"speed: relative to {first_few(bases)}" + (", of the same job" if len(bases) > 1 else ""))
    if left_out:
        lines.append(f"no room for: {first_few(left_out)}")
    return "\n".join(lines)


Column = tuple[Literal["left", "right"], Callable[[Run], str]]
"""How a column is justified, and its text for a run."""


def _columns(runs: Sequence[Run], *, unicode: bool) -> dict[str, Column]:
    def shown(name: str, text: Callable[[float], str]) -> Column:
        return "right", lambda run: "-" if (v := run.figure(name)) is None else text(v)

    most = max((run.figure("samples_per_s") or 0.0 for run in runs), default=0.0)

    def speed_bar(run: Run) -> str:
        value = run.figure("samples_per_s")
        return bar(value / most, width=_BAR_WIDTH, unicode=unicode) if value and most else ""

    def relative(run: Run) -> str:
        value = relative_speed(run, runs)
        return f"{value:.2f}x" if value else "-"

    def bubble(run: Run) -> str:
        measured, theory = run.figure("bubble_pct"), run.figure("bubble_theory_pct")
        return "-" if measured is None or theory is None else f"{measured:.0f}% ({theory:.0f}%)"

    columns: dict[str, Column] = {
        "run": ("left", lambda run: run.path.name),
        "state": ("left", lambda run: run.state.lower()),
        "job": ("left", lambda run: run.job),
        "strategy": ("left", lambda run: run.strategy),
        "workers": ("right", lambda run: str(run.workers or "-")),
        "samples/s": shown("samples_per_s", rate),
        "bar": ("left", speed_bar),
        "speed": ("right", relative),
        "p50 ms": shown("step_ms_p50", lambda v: f"{v:.1f}"),
        "p95 ms": shown("step_ms_p95", lambda v: f"{v:.1f}"),
        "bubble (theory)": ("right", bubble),
        "loss": shown("final_loss", figure),
        "val acc": shown("val_accuracy", figure),
        "start-up s": shown("startup_s", lambda v: f"{v:.1f}"),
        "restarts": shown("restarts", lambda v: f"{v:.0f}"),
    }
    if len({run.job for run in runs}) == 1:
        del columns["job"]
    if all(run.figure("bubble_pct") is None for run in runs):
        del columns["bubble (theory)"]
    return columns


def _grid(runs: Sequence[Run], columns: Mapping[str, Column], name_width: int, *, unicode: bool) -> Table:
    """The table; names of runs are cut to ``name_width``."""
    grid = plain_table(unicode=unicode)
    for name, (justify, _) in columns.items():
        grid.add_column("" if name == "bar" else name, justify=justify, no_wrap=True)
    for run in runs:
        first, *rest = (text(run) for _, text in columns.values())
        if len(first) > name_width:
            first = first[: max(1, name_width - 1)] + ("…" if unicode else "~")
        grid.add_row(first, *rest)
    return grid
