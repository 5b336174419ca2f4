"""Runs side by side: a table, and a picture of loss by samples, loss by time and throughput."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.config.text import first_few, plain
from orchestrator.display.comparison import FINAL_LOSS, RATE, ComparedRun, Curve
from orchestrator.display.plain_text import (
    TableColumn,
    bar,
    cut,
    duration,
    format_value,
    number,
    rate,
    takes_unicode,
    text_lines,
    total_width,
)
from orchestrator.features.sweep.comparison_analysis import (
    Comparison,
    differences,
    noise,
    settings,
    shared_baselines,
    verdict,
)
from orchestrator.features.sweep.ranking import ranking
from orchestrator.protocol.core_metrics import CORE_METRICS, LOSS, SAMPLES_PER_S
from orchestrator.protocol.metrics import Column, MetricRegistry, MetricSpec, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    best = ranking(runs)
    if best is not None and best.key not in {summary.key for _, summary, _ in _declared_columns(runs)}:
        cells = [number(best.values[run.location]) if run.location in best.values else "-" for run in runs]
        found.append(TableColumn(heading=f"best {best.name}", priority=9, cells=cells))
    found += [
        TableColumn(heading="start-up s", priority=2, cells=[_cell(run, "startup_s", "{:.1f}") for run in runs]),
        TableColumn(heading="restarts", priority=1, cells=[_cell(run, "restarts", "{:.0f}") for run in runs]),
    ]
    return [replace(column, cells=[column.cells[row] for row in comparison.rows]) for column in found]


def _declared_columns(runs: Sequence[ComparedRun]) -> list[tuple[MetricSpec, Summary, Column]]:
    """The columns that the metrics of the runs declare, without empty optional ones."""
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
    found = (
        [TableColumn(heading="", name="bar", justify="left", priority=8, cells=bars)]
        if sum(map(bool, bars)) > 1
        else []
    )
    if any(speeds):
        found.append(TableColumn(heading="speed", cells=[f"{speed:.2f}x" if speed else "-" for speed in speeds]))
    efficiencies = [comparison.scaling_efficiency(run) for run in comparison.runs]
    if any(e is not None for e in efficiencies):
        cells = ["-" if e is None else f"{e:.0%}" for e in efficiencies]
        found.append(TableColumn(heading="scaling", priority=8, cells=cells))
    return found


def _time_to_target(comparison: Comparison) -> TableColumn:
    times = [comparison.seconds_to_target(run) for run in comparison.runs]
    cells = ["-" if time is None else duration(time) for time in times]
    return TableColumn(heading=f"to loss {number(comparison.target_loss or 0.0)}", priority=9, cells=cells)


MOST_CURVES = 12
"""More curves in one plot cannot be told apart; colours and dashes together distinguish so many."""

_LEGEND_CHARACTERS = 105

# Okabe and Ito's colours, which colour-blind people can distinguish; yellow is too pale for lines.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")

_STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.edgecolor": "none",
    "legend.handlelength": 3.2,
}
"""Settings of matplotlib."""

_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1.5)), (0, (8, 3)))
_SMOOTH_FROM_POINTS = 80


def draw(comparison: Comparison, path: Path) -> None:
    """Draw loss against samples and against time, and throughput, as a PNG at ``path``.

    Repeats are drawn as their mean. Of more than ``MOST_CURVES`` runs, the fastest are drawn.

    Raises:
        OSError: ``path`` cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    comparison = comparison.grouped
    runs = _drawn(comparison)
    names = [_plain(comparison.name(run)) for run in runs]
    curves = [comparison.curves[run.location] for run in runs]
    legend_columns = max(1, min(len(names), _LEGEND_CHARACTERS // (max(map(len, names)) + 10)))
    losses_height = 4.1 + 0.26 * math.ceil(len(names) / legend_columns)
    rates_height = 0.9 + 0.36 * len(runs)
    with plt.rc_context(_STYLE):
        figure_ = plt.figure(
            figsize=(10, losses_height + rates_height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        )
        above, below = figure_.subfigures(2, height_ratios=(losses_height, rates_height), squeeze=False).flat
        by_samples, by_seconds = above.subplots(1, 2, sharey=True)
        _draw_losses(by_samples, by_seconds, curves, names)
        above.legend(*by_seconds.get_legend_handles_labels(), loc="outside lower center", ncols=legend_columns)
        _draw_rates(below.subplots(), comparison, runs, names)
        figure_.savefig(path, dpi=150)
        plt.close(figure_)


def _drawn(comparison: Comparison) -> Sequence[ComparedRun]:
    """Return the runs that a plot shows: all in their order, or only the fastest."""
    runs = comparison.runs
    if len(runs) <= MOST_CURVES:
        return runs
    fastest = sorted(runs, key=lambda run: run.value(RATE) or 0.0, reverse=True)[:MOST_CURVES]
    kept = {run.location for run in fastest}
    return [run for run in runs if run.location in kept]


def _draw_losses(by_samples: Axes, by_seconds: Axes, curves: Sequence[Curve], names: Sequence[str]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    for i, (curve, name) in enumerate(zip(curves, names, strict=True)):
        # Curves are often equal: earlier ones are wider, so that they show beneath later ones.
        style = {**_line_style(i), "label": name}
        line = _smoothed(curve.losses)
        by_samples.plot(curve.samples, line, linewidth=1.8 + 0.5 * (len(names) - 1 - i), **style)
        by_seconds.plot(curve.seconds, line, linewidth=2, **style)
    finite = [v for c in curves for v in c.losses if math.isfinite(v)]
    if finite and min(finite) > 0 and max(finite) > 30 * min(finite):
        by_samples.set_yscale("log")
        by_samples.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        by_samples.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        by_samples.yaxis.set_minor_locator(NullLocator())
    by_samples.set(title="Loss by samples", xlabel="samples seen", ylabel="training loss")
    by_seconds.set(title="Loss by time", xlabel="seconds since the first point")
    by_samples.xaxis.set_major_formatter(_thousands)
    if not finite:
        by_samples.text(0.5, 0.5, "no loss logged", ha="center", transform=by_samples.transAxes)


def _draw_rates(axes: Axes, comparison: Comparison, runs: Sequence[ComparedRun], names: Sequence[str]) -> None:
    rates = [run.value(RATE) for run in runs]
    spreads = [run.spread.get(RATE, 0.0) for run in runs]
    colours = [_COLOURS[i % len(_COLOURS)] for i in range(len(runs))]
    errors: dict[str, Any] = {"xerr": spreads, "capsize": 3, "ecolor": "#444444"} if any(spreads) else {}
    axes.barh(range(len(runs)), [r or 0.0 for r in rates], height=0.62, color=colours, **errors)
    for i, (run, value) in enumerate(zip(runs, rates, strict=True)):
        text = "not measured"
        if value:
            text = rate(value)
            if run is not comparison.baselines[run.work]:
                text += f"  ({comparison.relative_speed(run):.2f}x)"
        axes.annotate(text, ((value or 0.0) + spreads[i], i), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(runs)), names)
    margin = 0.5 if len(runs) > 1 else 0.8
    axes.set_ylim(len(runs) - 1 + margin, -margin)
    axes.set_xlim(0, 1.2 * max([r for r in rates if r], default=1.0))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(_thousands)
    title = "Throughput"
    if len(runs) < len(comparison.runs):
        title += f" of the {len(runs)} fastest of {len(comparison.runs)} runs"
    axes.set(title=title, xlabel="samples per second")


def _line_style(index: int) -> dict[str, Any]:
    """Return the colour and the dashes of the line ``index``; lines of equal colours have other dashes."""
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "linestyle": _DASHES[(index + index // len(_COLOURS)) % len(_DASHES)],
    }


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return a running mean over a fortieth of the points; few points stay as they are."""
    if len(values) <= _SMOOTH_FROM_POINTS:
        return list(values)
    half = len(values) // 80
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _plain(text: str) -> str:
    """Return ``text`` for matplotlib, which takes ``$`` for a formula and leaves ``_label`` out of legends."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _thousands(value: float, _: float) -> str:
    """Format a tick: ``500``, ``1.5k``, ``2M``."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
