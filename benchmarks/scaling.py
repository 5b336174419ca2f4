"""Speedup of ``ddp`` on two workers over ``single`` at the same global batch, relative to the machine's ceiling C.

python benchmarks/scaling.py
"""

from __future__ import annotations

import statistics

from ceiling import ceiling
from harness.arms import Timing, Workload, ours, running_ray
from harness.rounds import Claim, argument_parser, rates_table, ratios, report, run_round

ROUNDS = 3
WORKLOADS = {
    "digits": Workload(
        job="jobs.digits.Digits", fields={"hidden": 1024, "depth": 4}, global_batch_size=512, steps=50, log_every=10
    ),
    "gpt": Workload(job="jobs.gpt.GPT", fields={"sample_tokens": 0}, global_batch_size=64, steps=50, log_every=10),
}


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    results: dict[str, list[dict[str, Timing]]] = {name: [] for name in WORKLOADS}
    ceilings: list[float] = []
    with running_ray() as address:
        for number in range(1 if arguments.quick else ROUNDS):
            ceilings.append(ceiling())
            print(f"round {number + 1}: C = {ceilings[-1]:.2f}")
            for name, workload in WORKLOADS.items():
                arms = {s: ours(workload, strategy=s, address=address) for s in ("single", "ddp")}
                results[name].append(run_round(arms, number))
    speedups = {name: ratios(rounds, "ddp", "single", "samples_per_s") for name, rounds in results.items()}
    report(
        "scaling",
        [
            Claim(
                name=f"{name}: samples/s, ddp / single / C",
                ratios=[s / c for s, c in zip(values, ceilings, strict=True)],
                at_least=0.85,
            )
            for name, values in speedups.items()
        ],
        ceiling=statistics.median(ceilings),
        rounds=results,
        notes="\n\n".join(
            f"{name}, ddp / single = {statistics.median(speedups[name]):.2f}:\n\n{rates_table(rounds)}"
            for name, rounds in results.items()
        ),
        keep=not arguments.quick,
    )


if __name__ == "__main__":
    main()
