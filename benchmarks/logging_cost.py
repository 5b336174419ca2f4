"""What logging costs: a point at every step against (almost) none, without tracking and with MLflow on SQLite.

python benchmarks/logging_cost.py
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from common import Claim, Work, ceiling, interleave, median_of, ours, ratios, report, running_ray, table

NEVER = Work(job="jobs.digits.Digits", fields={"hidden": 1024}, global_batch_size=128, steps=400, log_every=100_000)
EVERY = Work(job="jobs.digits.Digits", fields={"hidden": 1024}, global_batch_size=128, steps=400, log_every=1)
SQLITE = "tracking.uri=sqlite:///mlflow.db"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    c = ceiling()
    with running_ray() as address:
        here = f"cluster.address='{address}'"
        arms = {
            "never": ours(NEVER, here),
            "every step": ours(EVERY, here),
            "never, sqlite": ours(NEVER, here, SQLITE),
            "every step, sqlite": ours(EVERY, here, SQLITE),
        }
        results = interleave(arms, rounds=rounds)
    claims = [
        Claim(
            name=f"{what}: every step / never{tracking}",
            values=ratios(results, *order, field),
            goal=goal,
            at_least=at_least,
        )
        for tracking in ("", ", sqlite")
        for what, field, order, goal, at_least in (
            ("samples/s", "samples_per_s", (f"every step{tracking}", f"never{tracking}"), 0.99, True),
            ("median step time", "step_ms_p50", (f"every step{tracking}", f"never{tracking}"), 1.01, False),
        )
    ]
    rows = [
        [arm, f"{median_of(results, arm, 'samples_per_s'):,.0f}", f"{median_of(results, arm, 'step_ms_p50'):.2f}"]
        for arm in arms
    ]
    notes = table(["arm", "samples/s", "median step, ms"], rows)
    details = [{arm: asdict(t) for arm, t in r.items()} for r in results]
    report("logging-cost", claims=claims, ceiling=c, notes=notes, details=details)


if __name__ == "__main__":
    main()
