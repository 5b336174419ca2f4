"""How much of the time is training when a worker is killed every ten seconds: ours with spares that are started anew in
the background, torchrun (--max-restarts) and Ray Train (FailureConfig).

python benchmarks/effective_time.py

Steps take 100 ms. The peers begin anew from a checkpoint that they write every 20 steps. Counted is the time from the
end of the first step to the end of the last one; effective is what the same steps take where nobody is killed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from arms import WORKERS, Work, launch, running_ray
from deaths import CHECKPOINT_EVERY, peers, run_peer, until_it_comes_back
from rounds import Claim, argument_parser, report, table

ROUNDS = 2
STUCK_AFTER_S = 150
KILL_EVERY = 100
OURS, UNDISTURBED = "ours, a spare", "ours, nobody killed"
WORK = Work(
    job="paced.Paced",
    fields={"hidden": 64, "step_ms": 100.0},
    global_batch_size=64,
    steps=350,
    log_every=10,
)


def ours(address: str, kills: Sequence[str]) -> Callable[[Path], float]:
    """Seconds, as :func:`peer`."""

    def run(folder: Path) -> float:
        words = ["strategy=ddp", f"strategy.num_workers={WORKERS}", f"cluster.address={address}", "tracking=none"]
        healing = ["recovery.spares=1", f"recovery.chaos=[{','.join(kills)}]"]
        run_dir = launch(WORK, [*words, *healing], folder, checkpoint_every=CHECKPOINT_EVERY)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        times = {line["step"]: line["time"] for line in lines if "train/loss" in line}
        return float(times[WORK.steps] - times[1])

    return run


def peer(command: list[str]) -> Callable[[Path], float]:
    def run(folder: Path) -> float:
        run_peer(command, WORK, folder, kill_at=KILL_EVERY, kill_every=KILL_EVERY, stuck_after_s=STUCK_AFTER_S)
        times = json.loads((folder / "times.json").read_text())
        return float(times["last"] - times["first"])

    return run


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    stuck: Counter[str] = Counter()
    seconds: dict[str, list[float]] = {}
    kills = [f"kill@{step}:{step // KILL_EVERY % WORKERS}" for step in range(KILL_EVERY, WORK.steps, KILL_EVERY)]
    with running_ray(num_cpus=WORKERS + 1) as address:
        arms = {
            UNDISTURBED: ours(address, []),
            OURS: ours(address, kills),
            **{name: peer(command) for name, command in peers(address).items()},
        }
        for number in range(1 if arguments.quick else ROUNDS):
            for name, arm in arms.items():
                seconds.setdefault(name, []).append(until_it_comes_back(name, arm, stuck))
                print(f"  round {number + 1}, {name}: {seconds[name][-1]:.2f} s", flush=True)
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
            Claim(name="effective part of the time, ours", ratios=shares[OURS], at_least=0.95),
            *(
                Claim(
                    name=f"effective part, {other} / ours",
                    ratios=[a / b for a, b in zip(shares[other], shares[OURS], strict=True)],
                    at_most=1.0,
                )
                for other in ("torchrun", "Ray Train")
            ),
        ],
        ceiling=None,
        rounds={},
        notes=table(["arm", "seconds, each round", "effective, %", "runs that never came back"], rows),
        keep=not arguments.quick,
    )


if __name__ == "__main__":
    main()
