"""What the death of a worker costs: seconds from SIGKILL to the end of the next step, and steps made again.

python benchmarks/recovery.py

Rank 1 of two kills itself before step 100, or stops itself, which has to be found out. Ours goes on in place, with a
spare and without, in a pipeline from copies made every 10 steps; torchrun (--max-restarts) and Ray Train
(FailureConfig) begin anew from a checkpoint that they write every 20 steps. Ours and Ray Train use a Ray that runs.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from arms import WORKERS, Work, launch, running_ray
from deaths import CHECKPOINT_EVERY, peers, run_peer, until_it_comes_back
from rounds import Claim, argument_parser, report, table

ROUNDS = 3
STUCK_AFTER_S = 60
"""Of a run of a quarter of that. It is tried again then, and counted."""
KILL_AT, COPY_EVERY = 100, 10
GOALS_S = {
    "ours, a spare": 0.6,
    "ours": 3.0,
    "ours, pipeline, a spare": 1.5,
    "ours, SIGSTOP, a spare": 6.5,
}
WORK = Work(
    job="jobs.digits.Digits", fields={"hidden": 1024, "depth": 3}, global_batch_size=128, steps=200, log_every=20
)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """``run_s``: the whole command."""

    seconds: float
    steps_lost: int
    run_s: float


def ours(address: str, spares: int, *more: str, fault: str = "kill") -> Callable[[Path], Cost]:
    def run(folder: Path) -> Cost:
        words = [
            f"strategy.num_workers={WORKERS}",
            f"cluster.address={address}",
            "tracking=none",
            f"recovery.spares={spares}",
            f"recovery.chaos=[{fault}@{KILL_AT}:1]",
            *more,
        ]
        began = time.monotonic()
        run_dir = launch(WORK, words, folder, checkpoint_every=CHECKPOINT_EVERY)
        run_s = time.monotonic() - began
        (said,) = re.findall(rf"recovery.chaos: {fault} at ([\d.]+)", (run_dir / "logs" / "rank-1.log").read_text())
        lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
        (back_at,) = [e["time"] for e in lines if e["event"] == "first_step_done" and e["generation"] == 2]
        summary = json.loads((run_dir / "run.json").read_text())["summary"]
        return Cost(seconds=back_at - float(said), steps_lost=summary["steps_lost"], run_s=run_s)

    return run


def peer(command: list[str]) -> Callable[[Path], Cost]:
    def run(folder: Path) -> Cost:
        began = time.monotonic()
        run_peer(command, WORK, folder, kill_at=KILL_AT, stuck_after_s=STUCK_AFTER_S)
        run_s = time.monotonic() - began
        return Cost(**json.loads((folder / "recovery.json").read_text()), run_s=run_s)

    return run


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    results: list[dict[str, Cost]] = []
    stuck: Counter[str] = Counter()
    with running_ray(num_cpus=WORKERS + 1) as address:
        arms = {
            "ours, a spare": ours(address, 1, "strategy=ddp"),
            "ours": ours(address, 0, "strategy=ddp"),
            "ours, pipeline, a spare": ours(address, 1, "strategy=pipeline", f"recovery.peer_copy_every={COPY_EVERY}"),
            "ours, SIGSTOP, a spare": ours(address, 1, "strategy=ddp", fault="stop"),
            **{name: peer(command) for name, command in peers(address).items()},
        }
        for number in range(1 if arguments.quick else ROUNDS):
            results.append(run_round(arms, number, stuck))
    report(
        "recovery",
        [
            *(
                Claim(name=f"seconds, {arm}", ratios=[r[arm].seconds for r in results], at_most=goal_s)
                for arm, goal_s in GOALS_S.items()
            ),
            *(
                Claim(
                    name=f"kill to the next step, ours, a spare / {other}",
                    ratios=ratios(results, "ours, a spare", other),
                    at_most=goal,
                )
                for other, goal in (("torchrun", 1.0), ("Ray Train", 0.15))
            ),
        ],
        ceiling=None,
        rounds={},
        notes=costs_table(results, stuck),
        keep=not arguments.quick,
    )


def run_round(arms: Mapping[str, Callable[[Path], Cost]], number: int, stuck: Counter[str]) -> dict[str, Cost]:
    costs = {}
    for name in arms if number % 2 == 0 else reversed(list(arms)):
        costs[name] = cost = until_it_comes_back(name, arms[name], stuck)
        print(f"  round {number + 1}, {name}: {cost.seconds:.2f} s, {cost.steps_lost} steps", flush=True)
    return costs


def ratios(results: list[dict[str, Cost]], over: str, under: str) -> list[float]:
    return [r[over].seconds / r[under].seconds for r in results]


def costs_table(results: list[dict[str, Cost]], stuck: Counter[str]) -> str:
    rows = [
        [
            name,
            f"{statistics.median(r[name].seconds for r in results):.2f} s",
            f"{statistics.median(r[name].steps_lost for r in results):.0f}",
            f"{statistics.median(r[name].run_s for r in results):.1f} s",
            f"{stuck[name]} of {stuck[name] + len(results)}",
        ]
        for name in results[0]
    ]
    return table(
        ["arm", "kill to the end of the next step", "steps lost", "the whole command", "runs that never came back"],
        rows,
    )


if __name__ == "__main__":
    main()
