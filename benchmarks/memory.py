"""The memory of workers: their shares of a large model, and the activations that they keep.

python benchmarks/memory.py

Memory is the peak resident set of a worker's process, minus that of a worker with a tiny model.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Sequence
from dataclasses import dataclass

from harness import forked
from harness.rounds import Claim, argument_parser, report, table

from jobs.gpt import GPT
from orchestrator.config.schema import Config
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.mesh_trainer import MeshTrainer
from orchestrator.strategies.parts.stages import Stages

LAYERS, WIDTH = 12, 512
SHARES = (2, 4)
"""Numbers of workers to divide the layers among."""
MICROBATCHES = 16
M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 2**16


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """One worker's peak memory, and the largest number of micro-batches that it held at once."""

    peak_mb: float
    live: int


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)  # so that what is freed leaves the resident set
    large, tiny = GPT(layers=LAYERS, width=WIDTH, context=16), GPT(layers=LAYERS, width=8, context=16)
    long = GPT(layers=LAYERS, width=256, context=128)
    floor_mb = observe(tiny, ["strategy=single"], batch=8)[0].peak_mb
    whole_mb = observe(large, ["strategy=single"], batch=8)[0].peak_mb - floor_mb
    claims = []
    shares = [["single", f"{whole_mb:,.0f}", "1.00"]]
    held = []
    for p in SHARES:
        baseline = observe(tiny, pipeline(p, "1F1B", 8), batch=8)
        own = [
            a.peak_mb - b.peak_mb
            for a, b in zip(observe(large, pipeline(p, "1F1B", 8), batch=8), baseline, strict=True)
        ]
        each = [mb / whole_mb for mb in own]
        shares.append([f"pipeline, {p} workers", listed(own, ",.0f"), listed(each, ".2f")])
        claims.append(
            Claim(name=f"peak memory, largest of {p} workers x {p} / single", ratios=[max(each) * p], at_most=1.15)
        )
        for schedule, expected in (("1F1B", p), ("GPipe", MICROBATCHES)):
            workers = observe(long, pipeline(p, schedule, MICROBATCHES), batch=128)
            live = [w.live for w in workers]
            held.append([schedule, str(p), listed(live, "d"), listed([w.peak_mb - floor_mb for w in workers], ",.0f")])
            name = f"peak micro-batches on stage 0 of {p}, {schedule}"
            claims.append(Claim(name=name, ratios=[live[0]], at_most=expected))
    activations_mb = {}
    for mode in ("none", "blocks"):
        overrides = ["strategy=single", f"train.activation_checkpointing={mode}"]
        peak_mb, base_mb = (observe(job, overrides, batch=32)[0].peak_mb for job in (long, tiny))
        activations_mb[mode] = peak_mb - base_mb
    recomputed = activations_mb["blocks"] / activations_mb["none"]
    claims.append(
        Claim(
            name="activations, train.activation_checkpointing=blocks / none",
            ratios=[recomputed],
            at_most=0.6,
        )
    )
    sample, short = (GPT(layers=LAYERS, width=256, context=context) for context in (1024, 16))
    divided = []
    for n in (1, *SHARES):
        layout = ["strategy=single"] if n == 1 else divided_samples(n)
        peaks = (observe(job, layout, batch=2)[0].peak_mb for job in (sample, short))
        divided.append(next(peaks) - next(peaks))
    kept = [mb / divided[0] for mb in divided]
    for n, share in zip(SHARES, kept[1:], strict=True):
        claims.append(Claim(name=f"a sample's activations, strategy.context={n} / single", ratios=[share]))
    parameters = LAYERS * 12 * WIDTH**2
    report(
        "memory",
        claims,
        ceiling=None,
        rounds={},
        notes="\n\n".join(
            [
                f"gpt with {parameters / 1e6:.0f} million parameters in float32 ({4 * parameters / 1e6:,.0f} MB; with "
                f"gradients and AdamW's state {16 * parameters / 1e6:,.0f} MB):",
                table(["layout", "MB per worker", "relative to single"], shares),
                f"gpt with larger activations than parameters, {MICROBATCHES} micro-batches:",
                table(["schedule", "stages", "peak micro-batches per worker", "MB per worker"], held),
                "the same model on one worker, 32 samples at once:",
                table(
                    ["train.activation_checkpointing", "MB"],
                    [[mode, f"{mb:,.0f}"] for mode, mb in activations_mb.items()],
                ),
                "the same model, two samples of 1,024 tokens:",
                table(
                    ["strategy.context", "MB per worker", "relative to single"],
                    [
                        [str(n), f"{mb:,.0f}", f"{share:.2f}"]
                        for n, mb, share in zip((1, *SHARES), divided, kept, strict=True)
                    ],
                ),
            ]
        ),
        keep=not arguments.quick,
    )


def pipeline(stages: int, schedule: str, num_microbatches: int) -> list[str]:
    """Return the overrides of a pipeline with an equal number of layers in each stage."""
    split = ",".join(f"block{LAYERS * stage // stages}" for stage in range(1, stages))
    return [
        "strategy=pipeline",
        f"strategy.num_workers={stages}",
        f"strategy.split=[{split}]",
        f"strategy.schedule={schedule}",
        f"strategy.num_microbatches={num_microbatches}",
    ]


def divided_samples(workers: int) -> list[str]:
    """Return the overrides of workers that divide the tokens of each sample, and the parameters."""
    return ["strategy=fsdp", f"strategy.num_workers={workers}", f"strategy.context={workers}"]


def observe(job: GPT, overrides: Sequence[str], *, batch: int) -> list[WorkerMemory]:
    """Train for a few steps and return the memory of each rank."""
    settings = ["job=gpt", "train.steps=7", f"train.global_batch_size={batch}"]
    workers = forked.train([*overrides, *settings], job, measure)
    print(f"  {' '.join(overrides)}: {listed([w.peak_mb for w in workers], ',.0f')} MB", flush=True)
    return workers


def measure(strategy: Strategy, config: Config) -> WorkerMemory:
    """Run the steps on one worker and measure its memory; a function for :func:`forked.train`."""
    forked.time_steps(strategy, config)
    part = strategy.part if isinstance(strategy, MeshTrainer) else None
    live = part.timed_stages[0].live if isinstance(part, Stages) else 1
    return WorkerMemory(peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, live=live)


def listed(values: Sequence[float], spec: str) -> str:
    """Format each value and join them with commas."""
    return ", ".join(format(value, spec) for value in values)


if __name__ == "__main__":
    main()
