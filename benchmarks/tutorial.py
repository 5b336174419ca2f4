"""The experiment of PyTorch's model-parallel tutorial: ResNet-50 on one worker, split in two, and pipelined.

python benchmarks/tutorial.py
python benchmarks/tutorial.py --image-size 128 --batch 120 --repeats 10    # the tutorial's sizes

The second stage begins with layer3, as in the tutorial. A repeat is three batches; means and standard deviations are
over repeats. On one CPU thread, a convolution takes longer per sample in a small micro-batch than in a large one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from ceiling import ceiling
from harness.arms import RESULTS, Arm, Timing, Workload, ours, run_dir_in, running_ray
from harness.rounds import Claim, argument_parser, interleave, ratios, report, table

from orchestrator.records.journal import read_metrics

ROUNDS = 2
BATCHES = 3
SPLIT = "layer3"
SINGLE, NAIVE = "single", "naive split"
PICTURE = RESULTS / "tutorial.png"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--image-size", type=int, default=64, help="width and height in pixels (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=24, help="images per batch (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=4, help="repeats per round (default: %(default)s)")
    arguments = parser.parse_args()
    batch, repeats = arguments.batch, arguments.repeats
    workload = Workload(
        job="jobs.resnet50.ResNet50",
        fields={"image_size": arguments.image_size},
        global_batch_size=batch,
        steps=BATCHES * math.ceil(repeats * 5 / 4),  # the first fifth is warm-up
        log_every=BATCHES,
    )
    cut = f"strategy.split=[{SPLIT}]"
    sizes = {_pipelined(size): size for size in range(2, batch // 2 + 1) if batch % size == 0}
    with running_ray() as address:
        arms = {
            SINGLE: ours(workload, strategy="single", address=address),
            NAIVE: ours(workload, strategy="model_parallel", address=address, overrides=[cut]),
        }
        for name, size in sizes.items():
            overrides = [cut, f"strategy.num_microbatches={batch // size}"]
            arms[name] = ours(workload, strategy="pipeline", address=address, overrides=overrides)
        times: dict[str, list[float]] = {name: [] for name in arms}
        c = ceiling()
        recording = {name: _recording(arm, times[name], repeats) for name, arm in arms.items()}
        rounds = interleave(recording, rounds=1 if arguments.quick else ROUNDS)

    best = min(sizes, key=lambda name: statistics.fmean(times[name]))
    single = statistics.fmean(times[SINGLE])
    rows = [
        [name, f"{statistics.fmean(t):.3f}", f"{statistics.stdev(t):.3f}", f"{single / statistics.fmean(t):.2f}"]
        for name, t in times.items()
    ]
    head = ["arm", "seconds per batch", "standard deviation", "speed relative to single"]
    title = f"ResNet-50, {arguments.image_size} x {arguments.image_size} pixels, batches of {batch}"
    report(
        "tutorial",
        [
            Claim(
                name="time, naive split / single (the tutorial: 1.07)",
                ratios=ratios(rounds, NAIVE, SINGLE, "step_ms_p50"),
                at_most=1.2,
            ),
            Claim(
                name=f"speed, {best} / single (the tutorial: 1.49 to 1.54)",
                ratios=ratios(rounds, SINGLE, best, "step_ms_p50"),
                at_least=1.0,
            ),
        ],
        ceiling=c,
        rounds={"resnet50": rounds},
        notes=f"{title}:\n\n{table(head, rows)}",
        keep=not arguments.quick,
    )
    if not arguments.quick:
        draw(times, title=title, path=PICTURE)


def _pipelined(size: int) -> str:
    return f"pipelined, micro-batches of {size}"


def _recording(arm: Arm, times: list[float], repeats: int) -> Arm:
    """Wrap an arm so that every run appends the seconds per batch of its last ``repeats`` repeats to ``times``."""

    def run(folder: Path) -> Timing:
        timing = arm(folder)
        points = read_metrics(run_dir_in(folder))
        times.extend([m["perf/step_ms"] / 1e3 for _, _, m in points if "perf/step_ms" in m][-repeats:])
        return timing

    return run


def draw(times: Mapping[str, Sequence[float]], *, title: str, path: Path) -> None:
    """Draw each arm's mean time and standard deviation as a PNG."""
    from matplotlib.figure import Figure

    means = [statistics.fmean(t) for t in times.values()]
    deviations = [statistics.stdev(t) for t in times.values()]
    colours = [
        "#999999",
        "#E69F00",
        *["#0072B2"] * (len(times) - 2),
    ]  # Okabe and Ito's palette, safe for colour-blind readers
    figure = Figure(figsize=(8, 0.9 + 0.32 * len(times)), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(times), means, xerr=deviations, color=colours, capsize=3, height=0.7)
    for y, (mean, deviation) in enumerate(zip(means, deviations, strict=True)):
        axes.annotate(f"{mean:.2f} s", (mean + deviation, y), (6, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(m + d for m, d in zip(means, deviations, strict=True)))
    axes.set_xlabel("seconds per batch, mean and standard deviation")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
