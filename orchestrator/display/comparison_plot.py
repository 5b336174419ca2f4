"""A picture of runs side by side: loss by samples, loss by time, throughput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.display.comparison import ComparedRun, Curve
from orchestrator.display.comparison_analysis import RATE, Comparison
from orchestrator.display.plot_style import COLOURS, STYLE, line_style, plain_in_plot, smoothed, thousands
from orchestrator.display.text import rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_CURVES = 12
"""More curves in one plot cannot be told apart; colours and dashes together distinguish so many."""

_LEGEND_CHARACTERS = 105


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
    runs = drawn(comparison)
    names = [plain_in_plot(comparison.name(run)) for run in runs]
    curves = [comparison.curves[run.location] for run in runs]
    legend_columns = max(1, min(len(names), _LEGEND_CHARACTERS // (max(map(len, names)) + 10)))
    losses_height = 4.1 + 0.26 * math.ceil(len(names) / legend_columns)
    rates_height = 0.9 + 0.36 * len(runs)
    with plt.rc_context(STYLE):
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


def drawn(comparison: Comparison) -> Sequence[ComparedRun]:
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
        style = {**line_style(i), "label": name}
        line = smoothed(curve.losses)
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
    by_samples.xaxis.set_major_formatter(thousands)
    if not finite:
        by_samples.text(0.5, 0.5, "no loss logged", ha="center", transform=by_samples.transAxes)


def _draw_rates(axes: Axes, comparison: Comparison, runs: Sequence[ComparedRun], names: Sequence[str]) -> None:
    rates = [run.value(RATE) for run in runs]
    spreads = [run.spread.get(RATE, 0.0) for run in runs]
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(runs))]
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
    axes.xaxis.set_major_formatter(thousands)
    title = "Throughput"
    if len(runs) < len(comparison.runs):
        title += f" of the {len(runs)} fastest of {len(comparison.runs)} runs"
    axes.set(title=title, xlabel="samples per second")
