"""The experiment of PyTorch's model-parallel tutorial: ResNet-50 on one worker, split in two, and as a pipeline.

python benchmarks/tutorial.py
python benchmarks/tutorial.py --image-size 128 --batch 120 --repeats 10    # the tutorial's own figures

The second part begins with layer3, as there. A repeat is three batches; mean and standard deviation are over repeats.
On one CPU thread a convolution takes longer for each sample in a small micro-batch than in a large one.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from arms import HERE, Arm, Timing, Work, ours, running_ray
from ceiling import ceiling
from rounds import Claim, argument_parser, interleave, ratios, report, table

ROUNDS = 2
BATCHES = 3
SPLIT = "layer3"
SINGLE, NAIVE = "single", "naive split"
PICTURE = HERE / "results" / "tutorial.png"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--image-size", type=int, default=64, help="pixels a side (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=24, help="images a batch (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=4, help="in each round (default: %(default)s)")
    arguments = parser.parse_args()
    batch, repeats = arguments.batch, arguments.repeats
    work = Work(
        job="jobs.resnet50.ResNet50",
        fields={"image_size": arguments.image_size},
        global_batch_size=batch,
        steps=BATCHES * math.ceil(repeats * 5 / 4),  # a fifth of them warms up
        log_every=BATCHES,
    )
    cut = f"strategy.split=[{SPLIT}]"
    sizes = {_pipelined(size): size for size in range(2, batch // 2 + 1) if batch % size == 0}
    with running_ray() as address:
        arms = {
            SINGLE: ours(work, strategy="single", address=address),
            NAIVE: ours(work, strategy="model_parallel", address=address, settings=[cut]),
        }
        for name, size in sizes.items():
            words = [cut, f"strategy.num_microbatches={batch // size}"]
            arms[name] = ours(work, strategy="pipeline", address=address, settings=words)
        times: dict[str, list[float]] = {name: [] for name in arms}
        c = ceiling()
        noting = {name: _noting(arm, times[name], repeats) for name, arm in arms.items()}
        rounds = interleave(noting, rounds=1 if arguments.quick else ROUNDS)

    best = min(sizes, key=lambda name: statistics.fmean(times[name]))
    single = statistics.fmean(times[SINGLE])
    rows = [
        [name, f"{statistics.fmean(t):.3f}", f"{statistics.stdev(t):.3f}", f"{single / statistics.fmean(t):.2f}"]
        for name, t in times.items()
    ]
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
        notes=f"{title}:\n\n{table(['', 's a batch', 'standard deviation', 'speed over single'], rows)}",
        keep=not arguments.quick,
    )
    if not arguments.quick:
        draw(times, title=title, path=PICTURE)


def _pipelined(size: int) -> str:
    return f"pipelined, micro-batches of {size}"


def _noting(arm: Arm, times: list[float], repeats: int) -> Arm:
    """The arm; it adds the seconds of a batch in each of its last ``repeats`` repeats to ``times``."""

    def run(folder: Path) -> Timing:
        timing = arm(folder)
        (metrics,) = folder.glob("outputs/*/*/metrics.jsonl")
        points = map(json.loads, metrics.read_text().splitlines())
        times.extend([p["perf/step_ms"] / 1e3 for p in points if "perf/step_ms" in p][-repeats:])
        return timing

    return run


def draw(times: Mapping[str, Sequence[float]], *, title: str, path: Path) -> None:
    """A bar for each way with its mean time and standard deviation, as a PNG."""
    from matplotlib.figure import Metric

    means = [statistics.fmean(t) for t in times.values()]
    deviations = [statistics.stdev(t) for t in times.values()]
    colours = ["#999999", "#E69F00", *["#0072B2"] * (len(times) - 2)]  # of Okabe and Ito's, safe for all eyes
    figure = Metric(figsize=(8, 0.9 + 0.32 * len(times)), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(times), means, xerr=deviations, color=colours, capsize=3, height=0.7)
    for y, (mean, deviation) in enumerate(zip(means, deviations, strict=True)):
        axes.annotate(f"{mean:.2f} s", (mean + deviation, y), (6, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(m + d for m, d in zip(means, deviations, strict=True)))
    axes.set_xlabel("seconds a batch, mean and standard deviation")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
