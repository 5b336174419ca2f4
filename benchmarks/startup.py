"""Process start to the end of the first step: ours, torchrun and Ray Train, on a new Ray and on one that runs.

python benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from common import (
    Claim,
    Timing,
    Work,
    ceiling,
    interleave,
    median_of,
    ours,
    ratios,
    ray_train,
    report,
    running_ray,
    table,
    torchrun,
)

WORK = Work(job="jobs.digits.Digits", steps=20, global_batch_size=64, fields={}, log_every=1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    c = ceiling()
    print("a new local Ray")
    new = interleave(
        {
            "ours": ours(WORK),
            "torchrun": torchrun(WORK),
            "Ray Train": ray_train(WORK),
            "Ray Train, no dashboard": ray_train(WORK, dashboard=False),
        },
        rounds=rounds,
    )
    print("a Ray that runs already")
    with running_ray() as address:
        running = interleave(
            {
                "ours": ours(WORK, f"cluster.address='{address}'"),
                "Ray Train": ray_train(WORK, environment={"RAY_ADDRESS": address}),
            },
            rounds=rounds,
        )
    claims = [
        Claim(
            name="ours / Ray Train, new local Ray",
            values=ratios(new, "ours", "Ray Train", "startup_s"),
            goal=0.40,
            at_least=False,
        ),
        Claim(
            name="ours / Ray Train without dashboard, new local Ray",
            values=ratios(new, "ours", "Ray Train, no dashboard", "startup_s"),
            goal=0.40,
            at_least=False,
        ),
        Claim(
            name="ours / Ray Train, Ray that runs already",
            values=ratios(running, "ours", "Ray Train", "startup_s"),
            goal=0.25,
            at_least=False,
        ),
    ]
    rows = [[f"{name}, new local Ray", f"{median_of(new, name, 'startup_s'):.2f} s"] for name in new[0]]
    rows += [[f"{name}, Ray that runs", f"{median_of(running, name, 'startup_s'):.2f} s"] for name in running[0]]
    notes = "\n\n".join(
        [
            table(["process start to the end of the first step", "median"], rows),
            "Parts of ours (medians; the rest is imports, checks and Ray's own start):",
            table(["part", "new local Ray", "Ray that runs"], _parts(new, running)),
        ]
    )
    details = {"new": _plain(new), "running": _plain(running)}
    report("startup", claims=claims, ceiling=c, notes=notes, details=details)


def _parts(new: Sequence[Mapping[str, Timing]], running: Sequence[Mapping[str, Timing]]) -> list[list[str]]:
    names = new[0]["ours"].parts
    return [
        [name, *(f"{statistics.median(r['ours'].parts[name] for r in rounds):.3f}" for rounds in (new, running))]
        for name in names
    ]


def _plain(rounds: Sequence[Mapping[str, Timing]]) -> list[dict[str, object]]:
    return [{arm: asdict(t) for arm, t in r.items()} for r in rounds]


if __name__ == "__main__":
    main()
