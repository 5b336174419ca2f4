"""The columns of a comparison, as a table on the console, as Markdown, and as plain values for other programs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orchestrator.config.text import first_few, plain
from orchestrator.display.comparison import ComparedRun
from orchestrator.display.comparison_analysis import (
    FINAL_LOSS,
    RATE,
    Comparison,
    differences,
    noise,
    settings,
    shared_baselines,
    verdict,
)
from orchestrator.display.plain_text import (
    TableColumn,
    bar,
    cut,
    duration,
    format_value,
    number,
    takes_unicode,
    text_lines,
    total_width,
)
from orchestrator.protocol.core_metrics import CORE_METRICS, LOSS, SAMPLES_PER_S
from orchestrator.protocol.metrics import Column, MetricRegistry, MetricSpec, Summary

_BAR_WIDTH = 10
_SHORTEST_NAME = 12
_WIDTH_WITHOUT_TERMINAL = 160


def table(comparison: Comparison) -> str:
    """Return a table with one row per run, and lines about how to read it.

    A narrow terminal first shortens the names of runs, then leaves out columns, which a line below names.
    """
    unicode = takes_unicode(sys.stdout)
    width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns
    shown = columns(comparison, unicode=unicode)
    dispensable = sorted((c for c in shown if c.priority is not None), key=lambda c: c.priority or 0)
    omitted: list[str] = []
    names, *_ = shown
    longest = names.width
    name_width = longest - max(0, total_width(shown) - width)
    while dispensable and name_width < min(longest, _SHORTEST_NAME):
        column = dispensable.pop(0)
        shown.remove(column)
        omitted.append(column.heading or column.name)
        name_width = longest - max(0, total_width(shown) - width)
    shown[0] = replace(names, cells=[cut(n, max(name_width, _SHORTEST_NAME), unicode=unicode) for n in names.cells])
    lines = [*text_lines(shown, unicode=unicode), *remarks(comparison)]
    text = "\n".join(lines + ([f"columns left out: {first_few(omitted)}"] if omitted else []))
    return text if unicode else text.replace("±", "+/-")


def remarks(comparison: Comparison) -> list[str]:
    """Return the lines below the table: what speeds are relative to, the noise, and what else differs."""
    bases = shared_baselines(comparison)
    lines = (
        [f"speed: relative to {first_few(bases)}" + (", of the same job" if len(bases) > 1 else "")] if bases else []
    )
    return [*lines, *noise(comparison), *(f"note: {line}" for line in differences(comparison.runs))]


def markdown(comparison: Comparison, *, title: str) -> str:
    """Return a report: a title, the verdict, the table and the remarks."""
    shown = [column for column in columns(comparison, unicode=True) if column.name != "bar"]
    head = " | ".join(plain(column.heading) for column in shown)
    rule = " | ".join("---" if column.justify == "left" else "---:" for column in shown)
    rows = [" | ".join(map(plain, cells)) for cells in zip(*(c.cells for c in shown), strict=True)]
    lines = "\n".join(f"| {row} |" for row in (head, rule, *rows))
    sentences = "\n".join(f"{plain(sentence[0].upper() + sentence[1:])}.\n" for sentence in verdict(comparison))
    below = [f"- {plain(line)}" for line in remarks(comparison)]
    return "\n".join([f"# {plain(title)}", "", sentences, lines, "", *below, ""])


def rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the values of each run under equal keys; None where a value is unknown."""
    keys = dict.fromkeys(summary.key for _, summary, _ in _declared_columns(comparison.runs))
    found = []
    for run in comparison.runs:
        row: dict[str, Any] = {
            "run": run.name,
            "location": run.location,
            "state": run.state,
            "job": run.job,
            "strategy": run.strategy,
            "workers": run.workers,
            "seed": run.params.get("seed"),
            "repeats": run.repeats,
            **{key: run.value(key) for key in keys},
            "relative_speed": comparison.relative_speed(run),
            "scaling_efficiency": comparison.scaling_efficiency(run),
        }
        row |= {f"{key}_spread": run.spread.get(key) for key in (RATE, FINAL_LOSS)} if run.repeats > 1 else {}
        if comparison.target_loss is not None:
            row["seconds_to_target_loss"] = comparison.seconds_to_target(run)
        found.append(row)
    return found


def columns(comparison: Comparison, *, unicode: bool) -> list[TableColumn]:
    """Return the columns in their order: what a run is, its metrics, its start-up and restarts."""
    runs = comparison.runs
    states = [run.state.lower() for run in runs]
    found = [
        TableColumn(heading="run", justify="left", cells=[run.name for run in runs]),
        TableColumn(heading="state", justify="left", priority=4 if len(set(states)) == 1 else 9, cells=states),
    ]
    if len({run.job for run in runs}) > 1:
        found.append(TableColumn(heading="job", justify="left", priority=3, cells=[run.job for run in runs]))
    found += [
        TableColumn(heading="strategy", justify="left", cells=[run.strategy for run in runs]),
        TableColumn(heading="workers", cells=[str(run.workers or "-") for run in runs]),
    ]
    if any(differing := settings(runs)):
        found.append(TableColumn(heading="settings", justify="left", priority=10, cells=differing))
    for spec, summary, column in _declared_columns(runs):
        cells = [_cell(run, summary.key, spec.format, beside=column.beside) for run in runs]
        found.append(TableColumn(heading=column.heading, priority=column.priority, cells=cells))
        if spec is SAMPLES_PER_S:
            found += _speed_columns(comparison, unicode=unicode)
        if spec is LOSS and comparison.target_loss is not None:
            found.append(_time_to_target(comparison))
    return [
        *found,
        TableColumn(heading="start-up s", priority=2, cells=[_cell(run, "startup_s", "{:.1f}") for run in runs]),
        TableColumn(heading="restarts", priority=1, cells=[_cell(run, "restarts", "{:.0f}") for run in runs]),
    ]


def _declared_columns(runs: Sequence[ComparedRun]) -> list[tuple[MetricSpec, Summary, Column]]:
    """The columns that the metrics of the runs declare, without those that are optional and empty."""
    registry = MetricRegistry(CORE_METRICS)
    for run in runs:
        for spec in run.metrics:
            registry.add(spec)
    declared = [(spec, s, s.column) for spec in registry for s in spec.summaries if s.column is not None]
    shown = [d for d in declared if d[2].always or any(run.value(d[1].key) is not None for run in runs)]
    return sorted(shown, key=lambda d: d[2].position)


def _cell(run: ComparedRun, key: str, template: str, *, beside: str | None = None) -> str:
    value, second = run.value(key), run.value(beside or key)
    if value is None or second is None:
        return "-"
    text = format_value(value, template)
    if key in run.spread and template in ("rate", "number") and value:
        text += f" ±{run.spread[key] / abs(value):.1%}"
    return text if beside is None else f"{text} ({format_value(second, template)})"


def _speed_columns(comparison: Comparison, *, unicode: bool) -> list[TableColumn]:
    """A bar for the throughput of each run, its relative speed, and its scaling efficiency if there is one."""
    rates = [run.value(RATE) for run in comparison.runs]
    most = max((r or 0.0 for r in rates), default=0.0)
    bars = [bar(r / most, width=_BAR_WIDTH, unicode=unicode) if r and most else "" for r in rates]
    speeds = [comparison.relative_speed(run) for run in comparison.runs]
    found = [
        TableColumn(heading="", name="bar", justify="left", priority=8, cells=bars),
        TableColumn(heading="speed", cells=[f"{speed:.2f}x" if speed else "-" for speed in speeds]),
    ]
    efficiencies = [comparison.scaling_efficiency(run) for run in comparison.runs]
    if any(e is not None for e in efficiencies):
        cells = ["-" if e is None else f"{e:.0%}" for e in efficiencies]
        found.append(TableColumn(heading="scaling", priority=8, cells=cells))
    return found


def _time_to_target(comparison: Comparison) -> TableColumn:
    times = [comparison.seconds_to_target(run) for run in comparison.runs]
    cells = ["-" if time is None else duration(time) for time in times]
    return TableColumn(heading=f"to loss {number(comparison.target_loss or 0.0)}", priority=9, cells=cells)
