"""Pictures of one run: where the time of its steps went, and the memory of its ranks.

``python -m orchestrator.display.run_pictures <run directory>`` draws and records them, in a process of its own: the
import of matplotlib takes longer than the end of a run should.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.display.plot_style import STYLE, line_style, plain_in_plot, smoothed, thousands
from orchestrator.protocol.core_metrics import COMM_MS, COMPUTE_MS, DATA_WAIT_MS, IDLE_MS, PEAK_MEMORY_MB
from orchestrator.records.journal import read_metrics
from orchestrator.records.run_dir import RunDir

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[int, Mapping[str, float]]]
"""Steps and what was logged at them."""

STEP_TIME = "step-time.png"
_MEMORY = "memory.png"

_PARTS = {
    COMPUTE_MS.name: ("compute", "#0072B2"),
    COMM_MS.name: ("wait for gradients", "#D55E00"),
    DATA_WAIT_MS.name: ("wait for data", "#E69F00"),
    IDLE_MS.name: ("wait for other stages", "#bdbdbd"),
}
"""The parts of a step from the bottom of the picture, with their colours."""

_RANK_MEMORY = re.compile(r"memory/rank_(\d+)_peak_mb")
_LEAST_POINTS = 2
_USUAL_SHARE = 0.95
_HEADROOM = 1.3


def draw_pictures(run_dir: RunDir) -> list[Path]:
    """Draw what a run has logged, below ``run_dir.plots``, and return the pictures; a short run has none.

    Raises:
        OSError: they cannot be written.
    """
    name = plain_in_plot(str(run_dir.read_record().get("name", run_dir.path.name)))
    points = [(step, metrics) for step, _, metrics in read_metrics(run_dir)]
    pictures = []
    steps = [(step, metrics) for step, metrics in points if metrics.keys() >= _PARTS.keys()]
    if len(steps) >= _LEAST_POINTS:
        pictures.append(run_dir.plots / STEP_TIME)
        _save(pictures[-1], lambda axes: _draw_parts(axes, steps, title=f"Step time of {name}"))
    lines = memory_lines(points)
    if any(len(line) >= _LEAST_POINTS for line in lines.values()):
        pictures.append(run_dir.plots / _MEMORY)
        _save(pictures[-1], lambda axes: _draw_memory(axes, lines, title=f"Peak memory of {name}"))
    return pictures


def memory_lines(points: Points) -> dict[str, list[tuple[int, float]]]:
    """Return the peak memory in MB by step, for each rank, or for the largest worker if that alone was logged."""
    names = {name for _, metrics in points for name in metrics if _RANK_MEMORY.fullmatch(name)}
    labels = {PEAK_MEMORY_MB.name: "largest worker"}
    if names:
        ranks = {name: int(name.split("_")[1]) for name in names}
        labels = {name: f"rank {ranks[name]}" for name in sorted(names, key=lambda name: ranks[name])}
    return {
        label: [(step, metrics[name]) for step, metrics in points if name in metrics] for name, label in labels.items()
    }


def usual_maximum(values: Sequence[float]) -> float:
    """Return the top of an axis for ``values``: a few far larger ones reach out of the picture."""
    ordered = sorted(values)
    usual = ordered[int(_USUAL_SHARE * (len(ordered) - 1))]
    return min(_HEADROOM * usual, 1.05 * ordered[-1]) or 1.0


def _draw_parts(axes: Axes, points: Points, *, title: str) -> None:
    steps = [step for step, _ in points]
    values = {part: [metrics[part] for _, metrics in points] for part in _PARTS}
    total = sum(map(sum, values.values())) or 1.0
    shown = {part: value for part, value in values.items() if any(value)}
    lines = [smoothed(value) for value in shown.values()]
    labels = [f"{_PARTS[part][0]}, {sum(value) / total:.0%}" for part, value in shown.items()]
    axes.stackplot(steps, *lines, labels=labels, colors=[_PARTS[part][1] for part in shown], linewidth=0)
    axes.set(title=title, xlabel="step", ylabel="ms per step")
    axes.set_ylim(0, usual_maximum([sum(parts) for parts in zip(*lines, strict=True)]))


def _draw_memory(axes: Axes, lines: Mapping[str, Sequence[tuple[int, float]]], *, title: str) -> None:
    for i, (label, line) in enumerate(lines.items()):
        steps, megabytes = zip(*line, strict=True)
        # Ranks are often equal: earlier ones are wider, so that they show beneath later ones.
        axes.plot(steps, megabytes, label=label, linewidth=1.8 + 0.5 * (len(lines) - 1 - i), **line_style(i))
    axes.set(title=title, xlabel="step", ylabel="peak memory, MB")
    axes.set_ylim(0, 1.1 * max(value for line in lines.values() for _, value in line))
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _save(path: Path, draw: Callable[[Axes], None]) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    path.parent.mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.margins(x=0)
        axes.xaxis.set_major_formatter(thousands)
        figure.legend(loc="outside lower center", ncols=6)
        figure.savefig(path, dpi=120)


def main(run_dir: RunDir) -> None:
    """Draw the pictures, and record which there are."""
    if pictures := draw_pictures(run_dir):
        run_dir.update_record(plots=sorted(picture.name for picture in pictures))


if __name__ == "__main__":
    main(RunDir(Path(sys.argv[1])))
