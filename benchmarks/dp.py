"""What DataParallel costs: bytes gathered on the first device, with the loss computed there and on the replicas, and
its step over that of DistributedDataParallel, on two devices that are threads or processes of this machine.

python benchmarks/dp.py
"""

from __future__ import annotations

import statistics

from forked import Seen, time_steps, train
from rounds import Claim, argument_parser, report, table

from jobs.gpt import BYTES, GPT

ROUNDS = 5
JOB = GPT(layers=2, width=128)
BATCH = 32
STEPS = 40
GATHERED_BYTES = BATCH * JOB.context * BYTES * 4
"""A logit for every possible next byte, in float32."""
ARMS = {
    "dp, loss on the first device": ("strategy=dp", "strategy.loss_on=device0"),
    "dp, loss on the replicas": ("strategy=dp", "strategy.loss_on=replicas"),
    "ddp": ("strategy=ddp",),
}


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    rounds = [run_round(number) for number in range(1 if arguments.quick else ROUNDS)]
    plain, on_replicas, ddp = ARMS
    gathered = {arm: [seen[arm].figures["dp/gathered_bytes"] for seen in rounds] for arm in (plain, on_replicas)}
    claims = [
        Claim(
            name="bytes gathered, loss on the first device / batch x context x 256 x 4",
            ratios=[n / GATHERED_BYTES for n in gathered[plain]],
            at_least=1.0,
        ),
        Claim(
            name="bytes gathered, loss on the replicas / on the first device",
            ratios=[b / a for a, b in zip(gathered[plain], gathered[on_replicas], strict=True)],
            at_most=0.001,
        ),
        *(
            Claim(name=f"step, ddp / {arm}", ratios=[_step_s(r[ddp]) / _step_s(r[arm]) for r in rounds], at_most=1.0)
            for arm in (plain, on_replicas)
        ),
    ]
    rows = [
        [
            arm,
            f"{1e3 * statistics.median(_step_s(seen[arm]) for seen in rounds):.1f}",
            f"{statistics.median(gathered[arm]):,.0f}" if arm in gathered else "",
        ]
        for arm in ARMS
    ]
    notes = table(["arm", "median step, ms", "bytes gathered a step"], rows)
    report("dp", claims, ceiling=None, rounds={}, notes=notes, keep=not arguments.quick)


def run_round(number: int) -> dict[str, Seen]:
    seen = {}
    for arm in ARMS if number % 2 == 0 else reversed(ARMS):
        words = ["strategy.num_workers=2", f"train.steps={STEPS}", f"train.global_batch_size={BATCH}", "job=gpt"]
        seen[arm] = train([*ARMS[arm], *words], JOB, time_steps)[0]
        print(f"  round {number + 1}, {arm}: {1e3 * _step_s(seen[arm]):.1f} ms", flush=True)
    return seen


def _step_s(seen: Seen) -> float:
    return statistics.median(seen.seconds)


if __name__ == "__main__":
    main()
