"""The cost of a worker's death: seconds from SIGKILL to the end of the next step, and steps repeated.

python benchmarks/recovery.py

Rank 1 of two kills itself before step 100, or stops itself (SIGSTOP), which has to be detected. Ours recovers in place,
with and without a spare, and in a pipeline and under fsdp from copies made every 10 steps. torchrun (--max-restarts)
and Ray Train (FailureConfig) restart from a checkpoint, which they write every 20 steps. Ours and Ray Train use a Ray
that is already running.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.arms import WORKERS, Workload, basic_overrides, launch, running_ray
from harness.deaths import CHECKPOINT_EVERY, peers, retried_if_stuck, run_peer
from harness.rounds import Claim, argument_parser, interleave, report, table

from orchestrator.records.journal import read_lines

ROUNDS = 3
PEER_TIMEOUT_S = 60
"""About four times as long as a run takes. Runs that time out are counted and repeated."""
KILL_AT, COPY_EVERY = 100, 10
GOALS_S = {
    "ours, one spare": 0.6,
    "ours": 3.0,
    "ours, pipeline, one spare": 1.5,
    "ours, SIGSTOP, one spare": 6.5,
}
WORKLOAD = Workload(
    job="jobs.digits.Digits", fields={"hidden": 1024, "depth": 3}, global_batch_size=128, steps=200, log_every=20
)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds from the fault to the end of the next step, steps repeated, and the time of the whole command."""

    seconds: float
    steps_lost: int
    run_s: float

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s, {self.steps_lost} steps"


def ours(
    address: str, *, strategy: str = "ddp", spares: int, fault: str = "kill", overrides: Sequence[str] = ()
) -> Callable[[Path], Cost]:
    """Return the arm that injects a fault into rank 1 of the orchestrator's run."""
    recovery = [f"recovery.spares={spares}", f"recovery.chaos=[{fault}@{KILL_AT}:1]"]
    all_overrides = [*basic_overrides(address, strategy=strategy), "tracking=none", *recovery, *overrides]

    def run(folder: Path) -> Cost:
        start = time.monotonic()
        run_dir = launch(WORKLOAD, all_overrides, folder, checkpoint_every=CHECKPOINT_EVERY)
        run_s = time.monotonic() - start
        # The worker prints the time of the fault before it dies.
        (fault_at,) = re.findall(rf"recovery.chaos: {fault} at ([\d.]+)", run_dir.log_file(1).read_text())
        events = [event for event, _ in read_lines(run_dir.events_file)]
        (back_at,) = [e["time"] for e in events if e["event"] == "first_step_done" and e["generation"] == 2]
        steps_lost = run_dir.read_record()["summary"]["steps_lost"]
        return Cost(seconds=back_at - float(fault_at), steps_lost=steps_lost, run_s=run_s)

    return run


def peer(command: list[str]) -> Callable[[Path], Cost]:
    """Return the arm that runs a peer whose rank 1 kills itself."""

    def run(folder: Path) -> Cost:
        start = time.monotonic()
        run_peer(command, WORKLOAD, folder, kill_at=KILL_AT, timeout_s=PEER_TIMEOUT_S)
        run_s = time.monotonic() - start
        return Cost(**json.loads((folder / "recovery.json").read_text()), run_s=run_s)

    return run


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    stuck: Counter[str] = Counter()
    with running_ray(num_cpus=WORKERS + 1) as address:
        arms = {
            "ours, one spare": ours(address, spares=1),
            "ours": ours(address, spares=0),
            "ours, pipeline, one spare": ours(
                address, strategy="pipeline", spares=1, overrides=[f"recovery.peer_copy_every={COPY_EVERY}"]
            ),
            "ours, fsdp, one spare": ours(
                address, strategy="fsdp", spares=1, overrides=[f"recovery.peer_copy_every={COPY_EVERY}"]
            ),
            "ours, SIGSTOP, one spare": ours(address, spares=1, fault="stop"),
            **{name: peer(command) for name, command in peers(address).items()},
        }
        results = interleave(
            {name: retried_if_stuck(name, arm, stuck) for name, arm in arms.items()},
            rounds=1 if arguments.quick else ROUNDS,
        )
    report(
        "recovery",
        [
            *(
                Claim(name=f"seconds, {arm}", ratios=[r[arm].seconds for r in results], at_most=goal_s)
                for arm, goal_s in GOALS_S.items()
            ),
            Claim(
                name="kill to the end of the next step, fsdp / ddp, one spare each",
                ratios=ratios(results, "ours, fsdp, one spare", "ours, one spare"),
                at_most=1.5,
            ),
            *(
                Claim(
                    name=f"kill to the end of the next step, ours, one spare / {other}",
                    ratios=ratios(results, "ours, one spare", other),
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


def ratios(results: list[dict[str, Cost]], numerator: str, denominator: str) -> list[float]:
    """Return the seconds of one arm divided by those of another, for each round."""
    return [r[numerator].seconds / r[denominator].seconds for r in results]


def costs_table(results: list[dict[str, Cost]], stuck: Counter[str]) -> str:
    """Return a table of the median costs of each arm."""
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
        ["arm", "kill to the end of the next step", "steps repeated", "whole command", "runs that timed out"],
        rows,
    )


if __name__ == "__main__":
    main()
