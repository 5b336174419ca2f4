"""``python -m orchestrator.compare --last 5``: runs side by side, as a table and as a picture.

Reads the run directories alone: neither MLflow nor torch is imported.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from orchestrator.display.report import bar, figure, first_few, plain_table, rate, render, takes_unicode, writable
from orchestrator.records.journal import read_metrics
from orchestrator.records.run_dir import RunDir, all_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which stay apart for colour-blind eyes; yellow is too pale for lines.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1.5)), (0, (8, 3)))
_BAR_WIDTH = 10
_LEAST_WANTED = ("restarts", "start-up s", "job", "state", "p95 ms", "p50 ms", "val acc", "bar", "bubble (theory)")
_SHORTEST_NAME = 12
_WIDEST = 1000
_WIDTH_WITHOUT_TERMINAL = 160
_SMOOTH_FROM_POINTS = 80


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


@dataclass(frozen=True, kw_only=True)
class Curve:
    """``train/loss`` at each logged point, against samples and against seconds since the first."""

    losses: list[float]
    samples: list[float]
    seconds: list[float]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        runs = _chosen(options)
    except CompareError as e:
        print(writable(f"compare: {e}", sys.stderr), file=sys.stderr)
        return 2
    print(writable(table(runs), sys.stdout))
    if options.no_picture:
        return 0
    path = options.picture or options.output_dir / "compare.png"
    try:
        draw(runs, path)
    except OSError as e:
        print(f"compare: cannot write the picture: {e}; choose --picture PATH", file=sys.stderr)
        return 1
    print(f"\npicture: {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.compare", description="Compare runs side by side.")
    parser.add_argument("runs", nargs="*", type=Path, help="run directories (default: the last N)")
    parser.add_argument("--last", type=_positive, default=5, metavar="N", help="newest runs (5)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="where runs are")
    parser.add_argument("--picture", type=Path, help="where to draw (<output-dir>/compare.png)")
    parser.add_argument("--no-picture", action="store_true", help="the table alone")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def _chosen(options: argparse.Namespace) -> list[Run]:
    """The named runs in the order given, or the last ones, oldest first."""
    if options.runs:
        return [read_run(path) for path in options.runs]
    found = list(itertools.islice(all_runs(options.output_dir), options.last))
    if not found:
        raise CompareError(
            f"no runs in {options.output_dir.resolve()}; start one with "
            "`python -m orchestrator.launch`, or name the place with --output-dir"
        )
    return [read_run(run.path) for run in reversed(found)]


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


def read_curve(run_dir: RunDir) -> Curve:
    """The loss points of a run; empty where it has logged none."""
    curve = Curve(losses=[], samples=[], seconds=[])
    start: float | None = None
    for _, time, metrics in read_metrics(run_dir):
        if "train/loss" in metrics and "train/samples_seen" in metrics:
            start = time if start is None else start
            curve.losses.append(metrics["train/loss"])
            curve.samples.append(metrics["train/samples_seen"])
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
        # Equal curves are the rule: earlier ones are wider, so that they show beneath later ones.
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
    """A running mean over a fortieth of the points where there are many of them."""
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
    rates = [run.figure("samples_per_s") for run in runs]
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


if __name__ == "__main__":
    sys.exit(main())
