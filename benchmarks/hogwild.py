"""Hogwild against locked SGD and one worker: updates per second, final loss, and the effect of delayed gradients.

python benchmarks/hogwild.py

The batch of an update has the same size in every arm. Two workers make two updates per step, so they run half as many
steps. The rates are those of the last three quarters of a run. The dense control computes the same gradients as dense
tensors, so that every update writes every parameter.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ceiling import ceiling
from harness.arms import RESULTS, Arm, Timing, Workload, ours, run_dir_in, running_ray
from harness.rounds import Claim, Rounds, argument_parser, interleave, ratios, report, table

from orchestrator.records.journal import read_metrics

ROUNDS = 3
"""Of the workload with goals; the others, which show a trend, run once."""
BATCH = 32
UPDATES = 24_000
POINTS, WARM_UP_POINTS = 8, 2
"""Logged points of a run, and those that its rate leaves out: a run of seconds is slower while it begins."""


@dataclass(frozen=True)
class Variant:
    """A strategy with its number of workers and further overrides."""

    strategy: str
    workers: int
    overrides: tuple[str, ...] = ()


VARIANTS = {
    "serial": Variant("single", 1),
    "hogwild": Variant("hogwild", 2),
    "locked": Variant("locked_sgd", 2),
    "update locked": Variant("locked_sgd", 2, ("strategy.lock=update",)),
}
LOCKED = {"locked": "around the whole step", "update locked": "around the update only"}
DELAYS_US = (0, 1000, 10_000)
PICTURE = RESULTS / "hogwild.png"


def workload(updates: int, **fields: object) -> Workload:
    """Return the workload of one worker; two workers run half as many steps with twice the batch."""
    return Workload(
        job="jobs.sparse.SparseLogistic",
        fields=fields,
        global_batch_size=BATCH,
        steps=updates,
        log_every=max(1, updates // POINTS),
    )


def arm(task: Workload, address: str, losses: list[float], variant: Variant) -> Arm:
    """Return the arm of a variant; every run appends its final validation loss to ``losses``."""
    workers = variant.workers
    scaled = replace(
        task,
        global_batch_size=BATCH * workers,
        steps=task.steps // workers,
        log_every=max(1, task.log_every // workers),
    )
    train = ours(scaled, strategy=variant.strategy, workers=workers, address=address, overrides=variant.overrides)

    def run(folder: Path) -> Timing:
        timing, run_dir = train(folder), run_dir_in(folder)
        losses.append(run_dir.read_record()["summary"]["val_loss"])
        rates = [point["perf/samples_per_s"] for _, _, point in read_metrics(run_dir) if "perf/samples_per_s" in point]
        return replace(timing, samples_per_s=statistics.harmonic_mean(rates[WARM_UP_POINTS:]))

    return run


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    rounds = 1 if arguments.quick else ROUNDS
    c = ceiling()
    tasks = {
        "sparse": workload(UPDATES),
        "dense control": workload(400, sparse=False),
        **{
            f"delay {d:,} us": workload(max(200, min(UPDATES, 4_000_000 // (d + 1000))), delay_us=d)
            for d in DELAYS_US[1:]
        },
    }
    results: dict[str, Rounds] = {}
    losses: dict[str, dict[str, list[float]]] = {}
    with running_ray() as address:
        for name, task in tasks.items():
            print(name)
            losses[name] = {v: [] for v in VARIANTS}
            arms = {v: arm(task, address, losses[name][v], variant) for v, variant in VARIANTS.items()}
            results[name] = interleave(arms, rounds=rounds if name == "sparse" else 1)
    loss_ratios = [h / s for h, s in zip(losses["sparse"]["hogwild"], losses["sparse"]["serial"], strict=True)]
    speedups = [r / c for r in ratios(results["sparse"], "hogwild", "serial", "samples_per_s")]
    sweep = {0: results["sparse"], **{d: results[f"delay {d:,} us"] for d in DELAYS_US[1:]}}
    locked_over_hogwild = {
        name: {
            d: statistics.median(ratios(of_delay, name, "hogwild", "samples_per_s")) for d, of_delay in sweep.items()
        }
        for name in LOCKED
    }
    report(
        "hogwild",
        [
            Claim(name="updates/s, hogwild on two workers / one worker / C", ratios=speedups, at_least=0.90),
            Claim(name="validation loss, hogwild / one worker", ratios=loss_ratios, at_most=1.02),
            Claim(
                name="updates/s, locked_sgd on two workers / one worker",
                ratios=ratios(results["sparse"], "locked", "serial", "samples_per_s"),
                at_most=1.05,
            ),
        ],
        ceiling=c,
        rounds=results,
        notes=f"{rates(results, losses)}\n\n{sweep_table(locked_over_hogwild)}",
        keep=not arguments.quick,
    )
    if not arguments.quick:
        draw(locked_over_hogwild, PICTURE)


def rates(results: Mapping[str, Rounds], losses: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return a table of the updates per second and the final loss of each variant."""
    rows = [
        [
            name,
            variant,
            f"{statistics.median(r[variant].samples_per_s for r in rounds) / BATCH:,.0f}",
            f"{statistics.median(losses[name][variant]):.4f}",
        ]
        for name, rounds in results.items()
        for variant in VARIANTS
    ]
    return table(["workload", "arm", "updates/s", "validation loss"], rows)


def sweep_table(locked_over_hogwild: Mapping[str, Mapping[int, float]]) -> str:
    """Return a table of the updates per second with each lock relative to hogwild, by delay."""
    columns = locked_over_hogwild.values()
    rows = [[f"{delay:,} us", *(f"{column[delay]:.2f}" for column in columns)] for delay in DELAYS_US]
    head = [f"updates/s relative to hogwild, lock {where}" for where in LOCKED.values()]
    return table(["delay per gradient", *head], rows)


def draw(locked_over_hogwild: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """Draw the delay sweep as a PNG, with a line for each lock."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1.0, color="#999999", linewidth=0.8)
    for (name, by_delay), colour in zip(locked_over_hogwild.items(), ("#0072B2", "#D55E00"), strict=True):
        axes.plot(range(len(by_delay)), list(by_delay.values()), marker="o", color=colour, label=f"lock {LOCKED[name]}")
    axes.set_xticks(range(len(DELAYS_US)), [f"{delay:,}" for delay in DELAYS_US])
    axes.set_ylim(0, 1.25)
    axes.set_xlabel("delay per gradient, microseconds")
    axes.set_ylabel("updates/s relative to lock-free")
    axes.set_title("A lock around the update costs less the longer a gradient takes", loc="left", fontsize=10)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
