"""The memory of workers that divide long samples by tokens, relative to one worker with whole samples.

python benchmarks/context.py

Memory is the peak resident set of a worker's process, minus that of a worker with short samples.
"""

from __future__ import annotations

from dataclasses import replace

from harness.rounds import Claim, argument_parser, report, table
from memory import listed, observe

from jobs.gpt import GPT

LONG = GPT(variant="llama", layers=8, width=256, heads=8, kv_heads=2, context=4096)
SIZES = (2, 4)
"""Numbers of workers that divide each sample."""
KEYS = 0.1
"""An upper limit of the keys and values of all tokens, relative to all that a block keeps of them."""


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    short = replace(LONG, context=64)
    taken: dict[int, list[float]] = {}
    for count in (1, *SIZES):
        of_count = ["strategy=single"]
        if count > 1:
            of_count = ["strategy=fsdp", f"strategy.context={count}", f"strategy.num_workers={count}"]
        pairs = zip(observe(LONG, of_count, batch=1), observe(short, of_count, batch=1), strict=True)
        taken[count] = [long.peak_mb - floor.peak_mb for long, floor in pairs]
    (whole,) = taken[1]
    report(
        "context",
        [
            Claim(
                name=f"activations, largest of {count} workers / single",
                ratios=[max(taken[count]) / whole],
                at_most=1 / count + KEYS,
            )
            for count in SIZES
        ],
        ceiling=None,
        rounds={},
        notes="\n\n".join(
            [
                f"gpt with {LONG.layers} blocks of Llama of width {LONG.width}, one sample of {LONG.context:,} tokens:",
                table(
                    ["strategy.context", "MB per worker", "relative to single"],
                    [
                        [str(count), listed(mb, ",.0f"), listed([each / whole for each in mb], ".2f")]
                        for count, mb in taken.items()
                    ],
                ),
            ]
        ),
        keep=not arguments.quick,
    )


if __name__ == "__main__":
    main()
