"""The effective share of training time when a worker is killed every ten seconds: ours with a spare, which is replaced
in the background, torchrun (--max-restarts) and Ray Train (FailureConfig).

python benchmarks/effective_time.py

Steps take 100 ms. The peers restart from a checkpoint, which they write every 20 steps. The time runs from the end of
the first step to the end of the last one; the effective share is the time of the same steps without kills over it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.arms import WORKERS, Workload, basic_overrides, launch, running_ray
from harness.deaths import CHECKPOINT_EVERY, peers, retried_if_stuck, run_peer
from harness.rounds import Claim, argument_parser, interleave, report, table

from orchestrator.records.journal import read_metrics

ROUNDS = 2
PEER_TIMEOUT_S = 150
KILL_EVERY = 100
OURS, UNDISTURBED = "ours, one spare", "ours, no kills"
WORKLOAD = Workload(
    job="paced.Paced",
    fields={"hidden": 64, "step_ms": 100.0},
    global_batch_size=64,
    steps=250,
    log_every=10,
)


def ours(address: str, kills: Sequence[str]) -> Callable[[Path], float]:
    """Return an arm that returns the seconds between the ends of the first and the last step."""
    recovery = ["recovery.spares=1", f"recovery.chaos=[{','.join(kills)}]"]
    overrides = [*basic_overrides(address), "tracking=none", *recovery]

    def run(folder: Path) -> float:
        run_dir = launch(WORKLOAD, overrides, folder, checkpoint_every=CHECKPOINT_EVERY)
        times = {step: time for step, time, metrics in read_metrics(run_dir) if "train/loss" in metrics}
        return times[WORKLOAD.steps] - times[1]

    return run


def peer(command: list[str]) -> Callable[[Path], float]:
    """Return an arm that returns the same time as that of :func:`ours`."""

    def run(folder: Path) -> float:
        run_peer(command, WORKLOAD, folder, kill_at=KILL_EVERY, kill_every=KILL_EVERY, timeout_s=PEER_TIMEOUT_S)
        times = json.loads((folder / "times.json").read_text())
        return float(times["last"] - times["first"])

    return run


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    stuck: Counter[str] = Counter()
    kills = [f"kill@{step}:{step // KILL_EVERY % WORKERS}" for step in range(KILL_EVERY, WORKLOAD.steps, KILL_EVERY)]
    with running_ray(num_cpus=WORKERS + 1) as address:
        arms = {
            UNDISTURBED: ours(address, []),
            OURS: ours(address, kills),
            **{name: peer(command) for name, command in peers(address).items()},
        }
        rounds = interleave(
            {name: retried_if_stuck(name, arm, stuck) for name, arm in arms.items()},
            rounds=1 if arguments.quick else ROUNDS,
            text="{:.2f} s".format,
        )
    seconds = {name: [r[name] for r in rounds] for name in arms}
    shares = {
        name: [a / b for a, b in zip(seconds[UNDISTURBED], values, strict=True)] for name, values in seconds.items()
    }
    rows = [
        [
            name,
            " ".join(f"{value:.1f}" for value in seconds[name]),
            " ".join(f"{100 * value:.1f}" for value in shares[name]),
            str(stuck[name]),
        ]
        for name in seconds
    ]
    report(
        "effective-time",
        [
            Claim(name="effective share, ours", ratios=shares[OURS], at_least=0.95),
            *(
                Claim(
                    name=f"effective share, {other} / ours",
                    ratios=[a / b for a, b in zip(shares[other], shares[OURS], strict=True)],
                    at_most=1.0,
                )
                for other in ("torchrun", "Ray Train")
            ),
        ],
        ceiling=None,
        rounds={},
        notes=table(["arm", "seconds, each round", "effective, %", "runs that timed out"], rows),
        keep=not arguments.quick,
    )


if __name__ == "__main__":
    main()
