"""A picture of runs side by side: loss by samples, loss by time, throughput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.display.comparison import ComparedRun, Curve
from orchestrator.display.comparison_analysis import RATE, Comparison
from orchestrator.display.plain_text import rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
