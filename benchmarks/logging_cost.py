"""The overhead of logging metrics at every step, without tracking and with MLflow on SQLite, and that of MLflow itself.

These runs end before the first upload. With an early upload, the follower imports MLflow during the run.

python benchmarks/logging_cost.py
"""

from __future__ import annotations

from dataclasses import replace

from harness.arms import Workload, ours, running_ray
from harness.rounds import Claim, argument_parser, interleave, rates_table, ratios, report

ROUNDS = 5
NEVER = Workload(job="jobs.digits.Digits", fields={"hidden": 1024}, global_batch_size=128, steps=600, log_every=100_000)
EVERY = replace(NEVER, log_every=1)
SQLITE = ("tracking.uri=sqlite:///mlflow.db", "tracking.log_model=false")
EARLY = (*SQLITE, "tracking.upload_every_s=1")


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    with running_ray() as address:
        arms = {
            "never": ours(NEVER, address=address),
            "every step": ours(EVERY, address=address),
            "never, MLflow": ours(NEVER, address=address, tracking=SQLITE),
            "every step, MLflow": ours(EVERY, address=address, tracking=SQLITE),
            "every step, MLflow, early upload": ours(EVERY, address=address, tracking=EARLY),
        }
        results = interleave(arms, rounds=1 if arguments.quick else ROUNDS)
    report(
        "logging-cost",
        [
            Claim(
                name=f"samples/s, every step / never{tracking}",
                ratios=ratios(results, f"every step{tracking}", f"never{tracking}", "samples_per_s"),
                at_least=0.99,
            )
            for tracking in ("", ", MLflow")
        ]
        + [
            Claim(
                name=f"samples/s, MLflow{upload} / no tracking, at every step",
                ratios=ratios(results, f"every step, MLflow{upload}", "every step", "samples_per_s"),
                at_least=0.97,
            )
            for upload in ("", ", early upload")
        ],
        ceiling=None,
        rounds={"digits": results},
        notes=rates_table(results),
        keep=not arguments.quick,
    )


if __name__ == "__main__":
    main()
