"""A transformer cut into two stages: over one worker, over the naive split, over plain torchrun.

python benchmarks/pipeline.py

Micro-batches are swept. The peer is the same schedule of ``torch.distributed.pipelining`` written by hand, with the
same cut.
"""

from __future__ import annotations

import statistics

from arms import Timing, Work, ours, running_ray, torch_pipeline
from ceiling import ceiling
from rounds import Claim, argument_parser, median, rates_table, ratios, report, run_round, table

ROUNDS = 3
WORK = Work(
    job="jobs.gpt.GPT",
    fields={"layers": 6, "width": 256, "context": 128, "sample_bytes": 0},
    global_batch_size=64,
    steps=6,
    log_every=3,
)
SPLIT = "block3"
"""Cuts the work in two equal parts."""
MICROBATCHES = (2, 4, 8, 16)
COMPARED = 8
"""The number of micro-batches at which schedules and launchers are compared."""
PIPELINE = {m: f"1F1B, m = {m}" for m in MICROBATCHES}
GPIPE, TORCHRUN = f"GPipe, m = {COMPARED}", f"torchrun, 1F1B, m = {COMPARED}"


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    rounds: list[dict[str, Timing]] = []
    ceilings: list[float] = []
    with running_ray() as address:
        cut = f"strategy.split=[{SPLIT}]"
        arms = {
            "single": ours(WORK, strategy="single", address=address),
            "naive": ours(WORK, strategy="model_parallel", address=address, settings=[cut]),
        }
        pipelines = {name: ("1F1B", m) for m, name in PIPELINE.items()} | {GPIPE: ("GPipe", COMPARED)}
        for name, (schedule, m) in pipelines.items():
            words = [cut, f"strategy.schedule={schedule}", f"strategy.num_microbatches={m}"]
            arms[name] = ours(WORK, strategy="pipeline", address=address, settings=words)
        arms[TORCHRUN] = torch_pipeline(WORK, split=SPLIT, schedule="1F1B", num_microbatches=COMPARED)
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
                "1F1B over the naive split, by the number m of micro-batches; the bound is 2m / (m + 1) x C / 2:",
                table(["m", "median step, ms", "speed over naive", "bound", "part of the bound"], sweep),
                "All arms:",
                rates_table(rounds),
            ]
        ),
        keep=not arguments.quick,
    )


def _bound(num_microbatches: int, c: float) -> float:
    """The most that two equal stages can gain on a machine of this ceiling."""
    return 2 * num_microbatches / (num_microbatches + 1) * c / 2


if __name__ == "__main__":
    main()
