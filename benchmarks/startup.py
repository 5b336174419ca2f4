"""Time from process start to the end of the first step: ours, torchrun and Ray Train, with a new and a running Ray.

python benchmarks/startup.py
"""

from __future__ import annotations

import statistics

from harness.arms import Workload, ours, ray_train, running_ray, torchrun
from harness.rounds import Claim, Rounds, argument_parser, interleave, median, ratios, report, table

ROUNDS = 5
WORKLOAD = Workload(job="jobs.digits.Digits", fields={}, steps=20, global_batch_size=64, log_every=1000)


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    rounds = 1 if arguments.quick else ROUNDS
    print("a new Ray")
    new = interleave(
        {
            "ours": ours(WORKLOAD),
            "torchrun": torchrun(WORKLOAD),
            "Ray Train": ray_train(WORKLOAD),
            "Ray Train, no dashboard": ray_train(WORKLOAD, dashboard=False),
        },
        rounds=rounds,
    )
    print("a running Ray")
    with running_ray() as address:
        running = interleave(
            {"ours": ours(WORKLOAD, address=address), "Ray Train": ray_train(WORKLOAD, address=address)}, rounds=rounds
        )
    results: dict[str, Rounds] = {"a new Ray": new, "a running Ray": running}
    report(
        "startup",
        [
            Claim(
                name="start to the end of the first step, ours / Ray Train: a new Ray",
                ratios=ratios(new, "ours", "Ray Train", "startup_s"),
                at_most=0.25,
            ),
            Claim(
                name="start to the end of the first step, ours / Ray Train: a new Ray, both without a dashboard",
                ratios=ratios(new, "ours", "Ray Train, no dashboard", "startup_s"),
                at_most=0.25,
            ),
            Claim(
                name="start to the end of the first step, ours / Ray Train: a running Ray",
                ratios=ratios(running, "ours", "Ray Train", "startup_s"),
                at_most=0.20,
            ),
        ],
        ceiling=None,
        rounds=results,
        notes=f"{_medians(results)}\n\nParts of ours, in seconds:\n\n{_parts(results)}",
        keep=not arguments.quick,
    )


def _medians(results: dict[str, Rounds]) -> str:
    rows = [
        [arm, where, f"{median(rounds, arm, 'startup_s'):.2f} s"]
        for where, rounds in results.items()
        for arm in rounds[0]
    ]
    return table(["arm", "with", "start to the end of the first step"], rows)


def _parts(results: dict[str, Rounds]) -> str:
    names = results["a new Ray"][0]["ours"].startup
    rows = [
        [name, *(f"{statistics.median(r['ours'].startup[name] for r in rounds):.2f}" for rounds in results.values())]
        for name in names
    ]
    return table(["part", *results], rows)


if __name__ == "__main__":
    main()
