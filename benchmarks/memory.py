"""What the workers of a pipeline need in memory: their share of a large model, the activations of some micro-batches.

python benchmarks/memory.py

Memory is the most that a worker's process has had in RAM, less what it has with next to no model.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass

import forked
from rounds import Claim, argument_parser, report, table

from jobs.gpt import GPT
from orchestrator.config.schema import Config
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.pipelined.pipeline import Pipeline

LAYERS, WIDTH = 12, 512
SHARES = (2, 4)
"""Numbers of workers that the layers are divided among."""
MICROBATCHES = 16


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Of a worker: its peak memory, and the most micro-batches that it held at once."""

    peak_mb: float
    live: int


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    large, nothing = GPT(layers=LAYERS, width=WIDTH, context=16), GPT(layers=LAYERS, width=8, context=16)
    long = GPT(layers=LAYERS, width=256, context=128)
    floor_mb = observe(nothing, ["strategy=single"], batch=8)[0].peak_mb
    whole_mb = observe(large, ["strategy=single"], batch=8)[0].peak_mb - floor_mb
    claims = []
    shares = [["single", f"{whole_mb:,.0f}", "1.00"]]
    held = []
    for p in SHARES:
        empty = observe(nothing, pipeline(p, "1F1B", 8), batch=8)
        own = [
            a.peak_mb - b.peak_mb for a, b in zip(observe(large, pipeline(p, "1F1B", 8), batch=8), empty, strict=True)
        ]
        each = [mb / whole_mb for mb in own]
        shares.append([f"pipeline, {p} workers", listed(own, ",.0f"), listed(each, ".2f")])
        claims.append(Claim(name=f"most of a worker x {p} / single", ratios=[max(each) * p], at_most=1.15))
        for schedule, expected in (("1F1B", p), ("GPipe", MICROBATCHES)):
            seen = observe(long, pipeline(p, schedule, MICROBATCHES), batch=128)
            live = [s.live for s in seen]
            held.append([schedule, str(p), listed(live, "d"), listed([s.peak_mb - floor_mb for s in seen], ",.0f")])
            name = f"micro-batches held by stage 0 of {p}, {schedule}"
            claims.append(Claim(name=name, ratios=[live[0]], at_most=expected))
    parameters = LAYERS * 12 * WIDTH**2
    report(
        "memory",
        claims,
        ceiling=None,
        rounds={},
        notes="\n\n".join(
            [
                f"gpt of {parameters / 1e6:.0f} million parameters in float32 ({4 * parameters / 1e6:,.0f} MB; with "
                f"gradients and AdamW's state {16 * parameters / 1e6:,.0f} MB):",
                table(["", "MB of each worker", "over single"], shares),
                f"gpt with more activations than parameters, {MICROBATCHES} micro-batches:",
                table(["schedule", "stages", "micro-batches held by each", "MB of each worker"], held),
            ]
        ),
        keep=not arguments.quick,
    )


def pipeline(stages: int, schedule: str, num_microbatches: int) -> list[str]:
    """With as many layers in each stage."""
    split = ",".join(f"block{LAYERS * stage // stages}" for stage in range(1, stages))
    return [
        "strategy=pipeline",
        f"strategy.num_workers={stages}",
        f"strategy.split=[{split}]",
        f"strategy.schedule={schedule}",
        f"strategy.num_microbatches={num_microbatches}",
    ]


def observe(job: GPT, words: Sequence[str], *, batch: int) -> list[Seen]:
    seen = forked.train([*words, "job=gpt", "train.steps=7", f"train.global_batch_size={batch}"], job, watch)
    print(f"  {' '.join(words)}: {listed([s.peak_mb for s in seen], ',.0f')} MB", flush=True)
    return seen


def watch(strategy: Strategy, config: Config) -> Seen:
    forked.time_steps(strategy, config)
    live = strategy.timed_stages[0].live if isinstance(strategy, Pipeline) else 1
    return Seen(peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, live=live)


def listed(values: Sequence[float], spec: str) -> str:
    return ", ".join(format(value, spec) for value in values)


if __name__ == "__main__":
    main()
