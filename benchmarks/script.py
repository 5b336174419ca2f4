"""``orchestrator torchrun`` relative to torchrun, with the same script: the start on a running Ray, and the throughput.

The processes of Ray and the driver need a few percent of a core. With as many ranks as cores the ranks lose them; with
a core free, as on machines with GPUs, they do not: both are measured.

python benchmarks/script.py
"""

from __future__ import annotations

from harness.arms import Workload, orchestrator_torchrun, running_ray, torchrun
from harness.rounds import Claim, argument_parser, interleave, rates_table, ratios, report

ROUNDS = 10
WORKLOAD = Workload(job="jobs.digits.Digits", fields={"hidden": 1024}, global_batch_size=128, steps=400, log_every=20)


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    with running_ray() as address:
        arms = {
            "ours": orchestrator_torchrun(WORKLOAD, address=address),
            "torchrun": torchrun(WORKLOAD),
            "ours, a core free": orchestrator_torchrun(WORKLOAD, address=address, workers=1),
            "torchrun, a core free": torchrun(WORKLOAD, workers=1),
        }
        results = interleave(arms, rounds=1 if arguments.quick else ROUNDS)
    report(
        "script",
        [
            Claim(
                name="samples/s, ours / torchrun",
                ratios=ratios(results, "ours", "torchrun", "samples_per_s"),
                at_least=0.99,
            ),
            Claim(
                name="the same with one rank, so that a core is free",
                ratios=ratios(results, "ours, a core free", "torchrun, a core free", "samples_per_s"),
                at_least=0.99,
            ),
            Claim(
                name="start to the end of the first step, ours - torchrun, in seconds",
                ratios=[r["ours"].startup_s - r["torchrun"].startup_s for r in results],
                at_most=2.5,
            ),
        ],
        ceiling=None,
        rounds={"digits": results},
        notes=rates_table(results),
        keep=not arguments.quick,
    )


if __name__ == "__main__":
    main()
