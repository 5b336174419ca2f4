"""Samples per second of ``strategy=ddp`` over plain torchrun and over Ray Train, on the same job, batch and data path.

python benchmarks/throughput.py torchrun
python benchmarks/throughput.py ray-train
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from common import (
    Arm,
    Claim,
    Timing,
    Work,
    ceiling,
    interleave,
    ours,
    ratios,
    ray_train,
    report,
    running_ray,
    table,
    torchrun,
)

RATE = "samples_per_s"
DIGITS = "jobs.digits.Digits"
WIDE = Work(job=DIGITS, fields={"hidden": 1024}, global_batch_size=128, steps=300, log_every=20)
LONG = Work(job=DIGITS, fields={"hidden": 1024, "depth": 4}, global_batch_size=256, steps=100, log_every=20)
SHORT = Work(job=DIGITS, fields={"hidden": 512}, global_batch_size=64, steps=600, log_every=20)
GPT = Work(job="jobs.gpt.GPT", fields={"sample_bytes": 0}, global_batch_size=64, steps=60, log_every=20)
EVERY_STEP = Work(job=DIGITS, fields={"hidden": 512}, global_batch_size=64, steps=200, log_every=1)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Ours against one peer at one size."""

    name: str
    work: Work
    goal: float


PAIRS = {
    "torchrun": [
        Pair(name="digits, hidden=1024", work=WIDE, goal=1.0),
        Pair(name="gpt", work=GPT, goal=1.0),
    ],
    "ray-train": [
        Pair(name="digits, ~40 ms steps", work=LONG, goal=1.0),
        Pair(name="digits, ~5 ms steps", work=SHORT, goal=1.2),
        Pair(name="digits, ~5 ms steps, metrics at every step", work=EVERY_STEP, goal=3.0),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PAIRS)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    peer: str = arguments.peer
    c = ceiling()
    results: dict[str, list[dict[str, Timing]]] = {}
    with running_ray() as address:
        for pair in PAIRS[peer]:
            print(pair.name)
            arms = {"ours": ours(pair.work, f"cluster.address='{address}'"), peer: _peer(peer, pair.work, address)}
            results[pair.name] = interleave(arms, rounds=arguments.rounds)
    claims = [
        Claim(
            name=f"ours / {peer}, {p.name}", values=ratios(results[p.name], "ours", peer, "samples_per_s"), goal=p.goal
        )
        for p in PAIRS[peer]
    ]
    report(f"throughput-{peer}", claims=claims, ceiling=c, notes=_absolute(results), details=_plain(results))


def _peer(name: str, work: Work, address: str) -> Arm:
    return torchrun(work) if name == "torchrun" else ray_train(work, environment={"RAY_ADDRESS": address})


def _absolute(results: Mapping[str, Sequence[Mapping[str, Timing]]]) -> str:
    rows = []
    for name, rounds in results.items():
        for arm in rounds[0]:
            rate = statistics.median(r[arm].samples_per_s for r in rounds)
            step_ms = statistics.median(r[arm].step_ms_p50 for r in rounds)
            rows.append([name, arm, f"{rate:,.0f}", f"{step_ms:.2f}"])
    return table(["work", "arm", "samples/s", "median step, ms"], rows)


def _plain(results: Mapping[str, Sequence[Mapping[str, Timing]]]) -> dict[str, object]:
    return {name: [{arm: asdict(t) for arm, t in r.items()} for r in rounds] for name, rounds in results.items()}


if __name__ == "__main__":
    main()
