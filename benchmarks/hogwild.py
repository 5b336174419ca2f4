"""Hogwild, the same with a lock, and one worker: updates a second, the loss they come to, and delays in the gradient.

python benchmarks/hogwild.py

An update is by a batch of one size in every arm; two workers make two in a step, so they take half as many steps. The
dense control computes the same gradients as dense tensors: every update then writes every parameter.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from arms import Arm, Timing, Work, launch, running_ray
from ceiling import ceiling
from rounds import HERE, Claim, argument_parser, interleave, ratios, report, table

ROUNDS = 3
BATCH = 32
UPDATES = 4000
STRATEGIES = {
    "serial": ("single", 1),
    "hogwild": ("hogwild", 2),
    "locked": ("locked_sgd", 2),
    "update locked": ("locked_sgd", 2, "strategy.lock=update"),
}
LOCKED = {"locked": "around the whole step", "update locked": "around the update alone"}
DELAYS_US = (0, 10, 100, 1000, 10_000)
PICTURE = HERE / "results" / "hogwild.png"


def work(updates: int, **fields: object) -> Work:
    """``updates`` of one worker; those of two are half as many steps of twice the batch."""
    return Work(
        job="jobs.sparse.SparseLogistic",
        fields=fields,
        global_batch_size=BATCH,
        steps=updates,
        log_every=max(1, updates // 8),
    )


def arm(task: Work, address: str, losses: list[float], strategy: str, workers: int, *words: str) -> Arm:
    """Its final validation loss goes to ``losses``."""

    def run(folder: Path) -> Timing:
        scaled = replace(task, global_batch_size=BATCH * workers, steps=task.steps // workers)
        scaled = replace(scaled, log_every=max(1, task.log_every // workers))
        common = [f"strategy={strategy}", f"strategy.num_workers={workers}", f"cluster.address={address}"]
        record = launch(scaled, [*common, *words, "tracking=none"], folder) / "run.json"
        summary = json.loads(record.read_text())["summary"]
        losses.append(summary["val_loss"])
        return Timing(**{name: summary[name] for name in Timing.__dataclass_fields__})

    return run


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    rounds = 1 if arguments.quick else ROUNDS
    c = ceiling()
    tasks = {
        "sparse": work(UPDATES),
        "dense control": work(400, sparse=False),
        **{f"delay {d:,} us": work(max(200, min(UPDATES, 4_000_000 // (d + 1000))), delay_us=d) for d in DELAYS_US[1:]},
    }
    results, losses = {}, {}
    with running_ray() as address:
        for name, task in tasks.items():
            print(name)
            losses[name] = {s: list[float]() for s in STRATEGIES}
            arms = {s: arm(task, address, losses[name][s], *of) for s, of in STRATEGIES.items()}
            results[name] = interleave(arms, rounds=rounds)
    gaps = [h / s for h, s in zip(losses["sparse"]["hogwild"], losses["sparse"]["serial"], strict=True)]
    share = [r / c for r in ratios(results["sparse"], "hogwild", "serial", "samples_per_s")]
    sweep = {0: results["sparse"], **{d: results[f"delay {d:,} us"] for d in DELAYS_US[1:]}}
    locked_over_hogwild = {
        arm: {d: statistics.median(ratios(of, arm, "hogwild", "samples_per_s")) for d, of in sweep.items()}
        for arm in LOCKED
    }
    draw(locked_over_hogwild, PICTURE)
    report(
        "hogwild",
        [
            Claim(name="updates/s, hogwild / serial / C", ratios=share, at_least=0.90),
            Claim(name="validation loss, hogwild / serial", ratios=gaps, at_most=1.02),
            Claim(
                name="updates/s, locked / serial",
                ratios=ratios(results["sparse"], "locked", "serial", "samples_per_s"),
                at_most=1.05,
            ),
        ],
        ceiling=c,
        rounds=results,
        notes=f"{rates(results, losses)}\n\n{sweep_table(locked_over_hogwild)}",
        keep=not arguments.quick,
    )


def rates(
    results: Mapping[str, Sequence[Mapping[str, Timing]]], losses: Mapping[str, Mapping[str, Sequence[float]]]
) -> str:
    rows = [
        [
            name,
            strategy,
            f"{statistics.median(r[strategy].samples_per_s for r in rounds) / BATCH:,.0f}",
            f"{statistics.median(losses[name][strategy]):.4f}",
        ]
        for name, rounds in results.items()
        for strategy in STRATEGIES
    ]
    return table(["work", "arm", "updates/s", "validation loss"], rows)


def sweep_table(locked_over_hogwild: Mapping[str, Mapping[int, float]]) -> str:
    rows = [[f"{delay:,} us", *(f"{of[delay]:.2f}" for of in locked_over_hogwild.values())] for delay in DELAYS_US]
    return table(
        ["delay in each gradient", *(f"updates/s over hogwild, lock {where}" for where in LOCKED.values())], rows
    )


def draw(locked_over_hogwild: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """The delay sweep as a line for each lock, as a PNG."""
    from matplotlib.figure import Metric

    figure = Metric(figsize=(6.5, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1.0, color="#999999", linewidth=0.8)
    for (arm, of), colour in zip(locked_over_hogwild.items(), ("#0072B2", "#D55E00"), strict=True):
        axes.plot(range(len(of)), list(of.values()), marker="o", color=colour, label=f"lock {LOCKED[arm]}")
    axes.set_xticks(range(len(DELAYS_US)), [f"{delay:,}" for delay in DELAYS_US])
    axes.set_ylim(0, 1.25)
    axes.set_xlabel("delay in each gradient, microseconds")
    axes.set_ylabel("updates/s over lock-free")
    axes.set_title("The longer a gradient takes, the less a lock around the update costs", loc="left", fontsize=10)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
