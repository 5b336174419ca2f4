"""A picture of runs side by side: loss by samples, loss by time, throughput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.display.comparison import Run, baseline, labels, relative_speed
from orchestrator.display.text import rate
from orchestrator.protocol.core_metrics import LOSS, SAMPLES_PER_S, SAMPLES_SEEN
from orchestrator.records.journal import read_metrics
from orchestrator.records.run_dir import RunDir

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind people can distinguish; yellow is too pale for lines.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1.5)), (0, (8, 3)))
_SMOOTH_FROM_POINTS = 80


@dataclass(frozen=True, kw_only=True)
class Curve:
    """``train/loss`` at each logged point, against samples and against seconds since the first."""

    losses: list[float]
    samples: list[float]
    seconds: list[float]


def read_curve(run_dir: RunDir) -> Curve:
    """Return the loss curve of a run; empty if it has logged no loss."""
    curve = Curve(losses=[], samples=[], seconds=[])
    start: float | None = None
    for _, time, metrics in read_metrics(run_dir):
        if LOSS.name in metrics and SAMPLES_SEEN.name in metrics:
            start = time if start is None else start
            curve.losses.append(metrics[LOSS.name])
            curve.samples.append(metrics[SAMPLES_SEEN.name])
            curve.seconds.append(time - start)
    return curve


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw loss against samples and against time, and throughput, as a PNG at ``path``.

    Raises:
        OSError: ``path`` cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = labels(runs)
    curves = [read_curve(RunDir(run.path)) for run in runs]
    with plt.rc_context(_STYLE):
        bars_height = 0.9 + 0.36 * len(runs)
        figure_, axes = plt.subplot_mosaic(
            [["samples", "seconds"], ["rates", "rates"]],
            figsize=(10, 4.1 + bars_height),
            height_ratios=(4.1, bars_height),
            layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
        )
        axes["seconds"].sharey(axes["samples"])
        _draw_losses(axes["samples"], axes["seconds"], curves, names)
        _draw_rates(axes["rates"], runs, names)
        figure_.savefig(path, dpi=150)
        plt.close(figure_)


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
}


def _draw_losses(by_samples: Axes, by_seconds: Axes, curves: Sequence[Curve], names: Sequence[str]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    for i, (curve, name) in enumerate(zip(curves, names, strict=True)):
        # Curves are often equal: earlier ones are wider, so that they show beneath later ones.
        style: dict[str, Any] = {
            "color": _COLOURS[i % len(_COLOURS)],
            "linestyle": _DASHES[i % len(_DASHES)],
            "label": name,
        }
        smoothed = _smoothed(curve.losses)
        by_samples.plot(curve.samples, smoothed, linewidth=1.8 + 0.5 * (len(names) - 1 - i), **style)
        by_seconds.plot(curve.seconds, smoothed, linewidth=2, **style)
    finite = [v for c in curves for v in c.losses if math.isfinite(v)]
    if finite and min(finite) > 0 and max(finite) > 30 * min(finite):
        by_samples.set_yscale("log")
        by_samples.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        by_samples.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        by_samples.yaxis.set_minor_locator(NullLocator())
    by_samples.set(title="Loss by samples", xlabel="samples seen", ylabel="training loss")
    by_seconds.set(title="Loss by time", xlabel="seconds since the first point")
    by_samples.xaxis.set_major_formatter(_thousands)
    by_seconds.tick_params(labelleft=False)
    if finite:
        by_seconds.legend(loc="best", handlelength=3.2)
    else:
        by_samples.text(0.5, 0.5, "no loss logged", ha="center", transform=by_samples.transAxes)


def _smoothed(values: Sequence[float]) -> list[float]:
    """A running mean over a fortieth of the points; few points stay as they are."""
    if len(values) <= _SMOOTH_FROM_POINTS:
        return list(values)
    half = len(values) // 80
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _thousands(value: float, _: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _draw_rates(axes: Axes, runs: Sequence[Run], names: Sequence[str]) -> None:
    rates = [run.value(SAMPLES_PER_S.summaries[0].key) for run in runs]
    colours = [_COLOURS[i % len(_COLOURS)] for i in range(len(runs))]
    axes.barh(range(len(runs)), [r or 0.0 for r in rates], height=0.62, color=colours)
    for i, (run, value) in enumerate(zip(runs, rates, strict=True)):
        text = "not measured"
        if value:
            text = rate(value)
            if run is not baseline(runs, run.work):
                text += f"  ({relative_speed(run, runs):.2f}x)"
        axes.annotate(text, (value or 0.0, i), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(runs)), names)
    margin = 0.5 if len(runs) > 1 else 0.8
    axes.set_ylim(len(runs) - 1 + margin, -margin)
    axes.set_xlim(0, 1.2 * max([r for r in rates if r], default=1.0))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(_thousands)
    axes.set(title="Throughput", xlabel="samples per second")
