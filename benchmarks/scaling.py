"""``ddp`` on two workers over ``single`` at the same global batch, as a part of what the machine can give (C).

python benchmarks/scaling.py
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict

from common import Claim, Timing, Work, ceiling, interleave, median_of, ours, ratios, report, running_ray, table

WORKS = {
    "digits": Work(
        job="jobs.digits.Digits", fields={"hidden": 1024, "depth": 4}, global_batch_size=512, steps=50, log_every=10
    ),
    "gpt": Work(job="jobs.gpt.GPT", fields={"sample_bytes": 0}, global_batch_size=64, steps=50, log_every=10),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    results: dict[str, list[dict[str, Timing]]] = {name: [] for name in WORKS}
    ceilings: list[float] = []
    with running_ray() as address:
        here = f"cluster.address='{address}'"
        for number in range(rounds):
            ceilings.append(ceiling(rounds=1))
            print(f"round {number + 1}/{rounds}: C = {ceilings[-1]:.2f}")
            for name, work in WORKS.items():
                arms = {
                    "single": ours(work, here, "strategy=single", workers=1),
                    "ddp": ours(work, here, "strategy=ddp"),
                }
                results[name] += interleave(arms, rounds=1, first=number)
    claims = []
    for name, timings in results.items():
        speedups = ratios(timings, "ddp", "single", "samples_per_s")
        shares = [s / c for s, c in zip(speedups, ceilings, strict=True)]
        claims.append(Claim(name=f"{name}: (ddp / single) / C", values=shares, goal=0.85))
    rows = [
        [
            name,
            f"{median_of(r, 'single', 'samples_per_s'):,.0f}",
            f"{median_of(r, 'ddp', 'samples_per_s'):,.0f}",
            f"{statistics.median(ratios(r, 'ddp', 'single', 'samples_per_s')):.2f}",
        ]
        for name, r in results.items()
    ]
    notes = table(["job", "single, samples/s", "ddp on 2, samples/s", "ddp / single"], rows)
    details = {
        "ceilings": ceilings,
        **{n: [{arm: asdict(t) for arm, t in r.items()} for r in rs] for n, rs in results.items()},
    }
    report("scaling", claims=claims, ceiling=statistics.median(ceilings), notes=notes, details=details)


if __name__ == "__main__":
    main()
