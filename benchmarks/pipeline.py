"""A transformer in two stages, compared with one worker, with the naive split and with plain torchrun.

python benchmarks/pipeline.py

The number of micro-batches is swept. The peer is a hand-written script that runs the same schedule of
``torch.distributed.pipelining`` with the same split.
"""

from __future__ import annotations

import statistics

from ceiling import ceiling
from harness.arms import Timing, Workload, ours, running_ray, torch_pipeline
from harness.rounds import Claim, argument_parser, median, rates_table, ratios, report, run_round, table

ROUNDS = 3
WORKLOAD = Workload(
    job="jobs.gpt.GPT",
    fields={"layers": 6, "width": 256, "context": 128, "sample_tokens": 0},
    global_batch_size=64,
    steps=6,
    log_every=3,
)
SPLIT = "block3"
"""Splits the work into two equal halves."""
MICROBATCHES = (4, 8, 16)
COMPARED = 8
"""The number of micro-batches at which launchers are compared."""
PIPELINE = {m: f"1F1B, m = {m}" for m in MICROBATCHES}
TORCHRUN = f"torchrun, 1F1B, m = {COMPARED}"


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    rounds: list[dict[str, Timing]] = []
    ceilings: list[float] = []
    with running_ray() as address:
        cut = f"strategy.split=[{SPLIT}]"
        arms = {
            "single": ours(WORKLOAD, strategy="single", address=address),
            "naive": ours(WORKLOAD, strategy="model_parallel", address=address, overrides=[cut]),
        }
        for m, name in PIPELINE.items():
            overrides = [cut, "strategy.schedule=1F1B", f"strategy.num_microbatches={m}"]
            arms[name] = ours(WORKLOAD, strategy="pipeline", address=address, overrides=overrides)
        arms[TORCHRUN] = torch_pipeline(WORKLOAD, split=SPLIT, schedule="1F1B", num_microbatches=COMPARED)
        for number in range(1 if arguments.quick else ROUNDS):
            ceilings.append(ceiling())
            print(f"round {number + 1}: C = {ceilings[-1]:.2f}")
            rounds.append(run_round(arms, number))

    over_naive = {m: ratios(rounds, "naive", name, "step_ms_p50") for m, name in PIPELINE.items()}
    reached = {
        m: [speedup / _bound(m, c) for speedup, c in zip(over_naive[m], ceilings, strict=True)] for m in MICROBATCHES
    }
    best = min(MICROBATCHES, key=lambda m: median(rounds, PIPELINE[m], "step_ms_p50"))
    c = statistics.median(ceilings)
    sweep = [
        [
            str(m),
            f"{median(rounds, PIPELINE[m], 'step_ms_p50'):.0f}",
            f"{statistics.median(over_naive[m]):.2f}",
            f"{_bound(m, c):.2f}",
            f"{statistics.median(reached[m]):.2f}",
        ]
        for m in MICROBATCHES
    ]
    report(
        "pipeline",
        [
            Claim(
                name="step time, naive split / single",
                ratios=ratios(rounds, "naive", "single", "step_ms_p50"),
                at_most=1.2,
            ),
            Claim(
                name=f"speed, 1F1B / naive split / bound, at the best m = {best}", ratios=reached[best], at_least=0.9
            ),
            Claim(
                name=f"speed, ours / torchrun, m = {COMPARED}",
                ratios=ratios(rounds, TORCHRUN, PIPELINE[COMPARED], "step_ms_p50"),
                at_least=0.98,
            ),
        ],
        ceiling=c,
        rounds={"gpt": rounds},
        notes="\n\n".join(
            [
                "Speed of 1F1B relative to the naive split, with m micro-batches; the bound is 2m / (m + 1) x C / 2:",
                table(["m", "median step, ms", "speed relative to naive", "bound", "share of the bound"], sweep),
                "All arms:",
                rates_table(rounds),
            ]
        ),
        keep=not arguments.quick,
    )


def _bound(num_microbatches: int, c: float) -> float:
    """Return the largest possible speedup of two equal stages over the naive split on a machine with ceiling ``c``."""
    return 2 * num_microbatches / (num_microbatches + 1) * c / 2


if __name__ == "__main__":
    main()
