"""The cost of DataParallel: bytes gathered on the first device with the loss computed there or on the replicas, and
the step time relative to DistributedDataParallel, on two CPU devices (threads for dp, processes for ddp).

python benchmarks/dp.py
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from harness.forked import StepTimes, time_steps, train
from harness.rounds import Claim, argument_parser, interleave, report, table

from jobs.gpt import GPT
from jobs.tokens import BYTES

ROUNDS = 5
JOB = GPT(layers=2, width=128)
BATCH = 32
STEPS = 40
GATHERED_BYTES = BATCH * JOB.tokens_per_sample * BYTES * 4
"""One float32 logit for every possible next byte."""
ARMS = {
    "dp, loss on the first device": ("strategy=dp", "strategy.loss_on=device0"),
    "dp, loss on the replicas": ("strategy=dp", "strategy.loss_on=replicas"),
    "ddp": ("strategy=ddp",),
}


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    rounds = interleave(
        {name: partial(step_times, overrides) for name, overrides in ARMS.items()},
        rounds=1 if arguments.quick else ROUNDS,
        text=lambda times: f"{1e3 * _step_s(times):.1f} ms",
    )
    on_device0, on_replicas, ddp = ARMS
    gathered = {arm: [r[arm].metrics["dp/gathered_bytes"] for r in rounds] for arm in (on_device0, on_replicas)}
    claims = [
        Claim(
            name="bytes gathered, loss on the first device / batch x context x 256 x 4",
            ratios=[n / GATHERED_BYTES for n in gathered[on_device0]],
            at_least=1.0,
        ),
        Claim(
            name="bytes gathered, loss on the replicas / on the first device",
            ratios=[b / a for a, b in zip(gathered[on_device0], gathered[on_replicas], strict=True)],
            at_most=0.001,
        ),
        *(
            Claim(name=f"step, ddp / {arm}", ratios=[_step_s(r[ddp]) / _step_s(r[arm]) for r in rounds], at_most=1.0)
            for arm in (on_device0, on_replicas)
        ),
    ]
    rows = [
        [
            arm,
            f"{1e3 * statistics.median(_step_s(r[arm]) for r in rounds):.1f}",
            f"{statistics.median(gathered[arm]):,.0f}" if arm in gathered else "",
        ]
        for arm in ARMS
    ]
    notes = table(["arm", "median step, ms", "bytes gathered per step"], rows)
    report("dp", claims, ceiling=None, rounds={}, notes=notes, keep=not arguments.quick)


def step_times(overrides: Sequence[str], _: Path) -> StepTimes:
    """Train once and return the step times of rank 0."""
    common = ["strategy.num_workers=2", f"train.steps={STEPS}", f"train.global_batch_size={BATCH}", "job=gpt"]
    return train([*overrides, *common], JOB, time_steps)[0]


def _step_s(times: StepTimes) -> float:
    return statistics.median(times.seconds)


if __name__ == "__main__":
    main()
