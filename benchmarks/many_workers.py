"""Start of 2 to 16 workers on a running Ray, relative to as many empty actors that import torch.

python benchmarks/many_workers.py

The times are those of whole commands: ours until the end of the first step, the other until all actors have answered.
The rendezvous is the part of ours in which the workers meet and form their process group. The longest part of it is the
wait for the last worker, because all share the cores of this machine while they start.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness.arms import PEERS, RESULTS, Workload, basic_overrides, execute, launch, running_ray
from harness.rounds import Claim, argument_parser, interleave, report, table

ROUNDS = 3
SIZES = (2, 8, 16)
OURS, EMPTY = "ours", "empty actors"
WORKLOAD = Workload(job="jobs.digits.Digits", fields={}, steps=5, global_batch_size=64, log_every=1000)
PICTURE = RESULTS / "many-workers.png"


@dataclass(frozen=True, kw_only=True)
class Start:
    """The seconds from process start until all workers are there, and those of their rendezvous; 0 without one."""

    seconds: float
    rendezvous_s: float = 0.0


def ours(workers: int, address: str, folder: Path) -> Start:
    """Start a training of ``workers`` workers."""
    run_dir = launch(WORKLOAD, [*basic_overrides(address, workers=workers), "tracking=none"], folder)
    summary = run_dir.read_record()["summary"]
    return Start(seconds=summary["startup_s"], rendezvous_s=summary["startup"]["rendezvous_s"])


def empty_actors(workers: int, address: str, folder: Path) -> Start:
    """Start ``workers`` actors that import torch."""
    result = folder / "result.json"
    started_at = time.time()
    words = [f"--workers={workers}", f"--address={address}", f"--result={result}"]
    execute([str(PEERS / "empty_actors.py"), *words], folder)
    return Start(seconds=json.loads(result.read_text())["answered_at"] - started_at)


ARMS: Mapping[str, Callable[[int, str, Path], Start]] = {OURS: ours, EMPTY: empty_actors}

Rounds = Sequence[Mapping[str, Start]]


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    sizes = SIZES[:2] if arguments.quick else SIZES
    with running_ray(num_cpus=sizes[-1]) as address:
        results = {}
        for workers in sizes:
            print(f"{workers} workers")
            results[workers] = interleave(
                {name: partial(arm, workers, address) for name, arm in ARMS.items()},
                rounds=1 if arguments.quick else ROUNDS,
                text=lambda start: f"{start.seconds:.2f} s",
            )
    report(
        "many-workers",
        [
            Claim(
                name=f"{workers} workers to the first step / {workers} empty actors",
                ratios=[r[OURS].seconds / r[EMPTY].seconds for r in rounds],
                at_most=1.15 if workers == SIZES[-1] else math.inf,
            )
            for workers, rounds in results.items()
        ],
        ceiling=None,
        rounds={},
        notes=f"{_table(results)}\n\n![Time of the rendezvous]({PICTURE.name})",
        keep=not arguments.quick,
    )
    if not arguments.quick:
        draw({n: _median(rounds, OURS, "rendezvous_s") for n, rounds in results.items()}, PICTURE)


def _median(rounds: Rounds, arm: str, field: str) -> float:
    return float(statistics.median(getattr(r[arm], field) for r in rounds))


def _table(results: Mapping[int, Rounds]) -> str:
    rows = [
        [
            str(workers),
            f"{_median(rounds, OURS, 'seconds'):.2f}",
            f"{_median(rounds, EMPTY, 'seconds'):.2f}",
            f"{statistics.median(r[OURS].seconds / r[EMPTY].seconds for r in rounds):.2f}",
            f"{_median(rounds, OURS, 'rendezvous_s'):.2f}",
        ]
        for workers, rounds in results.items()
    ]
    return table(["workers", "ours, s", "empty actors, s", "ratio", "rendezvous, s"], rows)


def draw(rendezvous_s: Mapping[int, float], path: Path) -> None:
    """Draw the time of the rendezvous against the number of workers as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(rendezvous_s), list(rendezvous_s.values()), marker="o", color="#0072B2")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(rendezvous_s), [str(workers) for workers in rendezvous_s])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("workers")
    axes.set_ylabel("rendezvous, s")
    axes.set_title("Time until all workers have formed their process group", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
