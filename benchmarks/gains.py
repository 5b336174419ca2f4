"""The picture of the README: how much faster two workers on two cores are than one, from the results of others.

python benchmarks/gains.py
"""

from __future__ import annotations

import json
import statistics

from harness.arms import RESULTS
from matplotlib.figure import Figure

ARMS = {
    "pipeline, gpt of width 256": ("pipeline", "gpt", "single", "1F1B, m = 16"),
    "ddp, gpt": ("scaling", "gpt", "single", "ddp"),
    "hogwild, sparse": ("hogwild", "sparse", "serial", "hogwild"),
    "ddp, digits of width 1024": ("scaling", "digits", "single", "ddp"),
}
"""For each bar: the result, its workload, the arm with one worker and the arm with two."""


def main() -> None:
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    ceilings = []
    for label, (result, workload, one, two) in ARMS.items():
        data = json.loads((RESULTS / f"{result}.json").read_text())
        gains = [arms[two]["samples_per_s"] / arms[one]["samples_per_s"] for arms in data["rounds"][workload]]
        ceilings.append(data["ceiling"])
        median = statistics.median(gains)
        spread = [[median - min(gains)], [max(gains) - median]]
        axes.barh([label], [median], xerr=spread, color="#0072B2", capsize=3, height=0.65)
        axes.annotate(f"{median:.2f}", (0.05, label), va="center", color="white", fontweight="bold")
        print(f"{label}: {median:.2f} ({min(gains):.2f} to {max(gains):.2f})")
    axes.axvline(1, color="#999999")
    ceiling = statistics.median(ceilings)
    axes.axvline(ceiling, color="#D55E00", linestyle="--")
    axes.annotate(f"two such cores do the\nwork of {ceiling:.2f}", (ceiling + 0.05, 2), va="center", color="#D55E00")
    axes.set_xlim(0, 2.6)
    axes.invert_yaxis()
    axes.set_xlabel("speed of two workers over one: median and range of the rounds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / "gains.png", dpi=110)


if __name__ == "__main__":
    main()
