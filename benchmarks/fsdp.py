"""``strategy=fsdp`` relative to a hand-written ``fully_shard`` under torchrun, and the memory of its workers.

python benchmarks/fsdp.py

Memory is the peak resident set of a worker's process, minus that of a worker with a tiny model. The C library returns
each larger block of memory at once, so that the peak is that of the tensors.
"""

from __future__ import annotations

import ctypes
import resource
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import forked
from harness.arms import Workload, ours, torchrun
from harness.rounds import Claim, argument_parser, interleave, rates_table, ratios, report, table
from torch.utils._python_dispatch import TorchDispatchMode

from jobs.gpt import GPT
from orchestrator.config.schema import Config
from orchestrator.strategies.base import Strategy

ROUNDS = 5
NEVER = 100_000
PRECISIONS = ("fp32", "bf16")
WIDE = {"layers": 6, "width": 512, "heads": 8, "context": 64, "sample_tokens": 0}
LAYERS, WIDTH = 12, 512
"""Of the model whose memory is measured. Its activations are small."""
M_MMAP_THRESHOLD, SMALL_BYTES = -3, 65_536
STORED = ("parameter", "gradient", "optimizer state")


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """One worker's peak memory, the bytes of its parameters, gradients and optimizer state after a step, and of what
    its steps have gathered in all."""

    peak_mb: float
    stored_mb: float
    gathered_mb: float


class Gathered(TorchDispatchMode):
    """Adds up what is gathered while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.num_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    workload = Workload(job="jobs.gpt.GPT", fields=WIDE, global_batch_size=16, steps=16, log_every=NEVER)
    arms = {
        "ours": ours(workload, strategy="fsdp"),
        "torchrun": torchrun(workload, script="torchrun_fsdp.py"),
    }
    rounds = interleave(arms, rounds=1 if arguments.quick else ROUNDS)
    speed = Claim(
        name=f"samples/s, fsdp / a hand-written `fully_shard` under torchrun: gpt, {WIDE['layers']} blocks",
        ratios=ratios(rounds, "ours", "torchrun", "samples_per_s"),
        at_least=0.98,
    )
    assert ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, SMALL_BYTES) == 1
    sizes, in_16_bits = memory(), memory_by_precision()
    report(
        "fsdp",
        [speed, *sizes.claims, *in_16_bits.claims],
        ceiling=None,
        rounds={"gpt": rounds},
        notes="\n\n".join([rates_table(rounds), *sizes.notes, *in_16_bits.notes]),
        keep=not arguments.quick,
    )


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The claims about memory, and what they rest on."""

    claims: Sequence[Claim]
    notes: Sequence[str]


def memory() -> Sizes:
    """Measure workers that divide a model, with and without what their forward and backward passes gather."""
    job, tiny = GPT(layers=LAYERS, width=WIDTH, heads=8, context=16), GPT(layers=LAYERS, width=8, heads=2, context=16)
    model = job.model()
    blocks_mb = [sum(p.nbytes for p in child.parameters()) / 1e6 for child in model.children()]
    kinds = Counter(map(type, model.children()))
    of_block_mb = max(mb for mb, child in zip(blocks_mb, model.children(), strict=True) if kinds[type(child)] > 1)
    root_mb = sum(mb for mb, child in zip(blocks_mb, model.children(), strict=True) if kinds[type(child)] == 1)
    claims, rows = [], []
    for workers in (2, 4):
        overrides = ["strategy=fsdp", f"strategy.num_workers={workers}"]
        floor, held = observe(tiny, overrides), observe(job, overrides)
        ideal_mb = 4 * sum(blocks_mb) / workers
        stored_mb = max(worker.stored_mb for worker in held)
        peak_mb = max(worker.peak_mb - low.peak_mb for worker, low in zip(held, floor, strict=True))
        bound_mb = ideal_mb + 2 * of_block_mb + root_mb
        name = f"bytes that a worker stores / its share, {workers} workers"
        claims.append(Claim(name=name, ratios=[stored_mb / ideal_mb], at_most=1.02))
        name = f"its peak / share, two blocks and what is outside of them, {workers} workers"
        claims.append(Claim(name=name, ratios=[peak_mb / bound_mb], at_most=1.0))
        above = (peak_mb - ideal_mb - root_mb) / of_block_mb
        rows.append([str(workers), *(f"{mb:,.1f}" for mb in (ideal_mb, stored_mb, peak_mb)), f"{above:.1f}"])
    head = ["workers", "share, MB", "stored, MB", "peak, MB", "peak above share and the rest of the model, in blocks"]
    about = (
        f"gpt with {LAYERS} blocks of {of_block_mb:.1f} MB and {root_mb:.1f} MB outside of them; parameters, gradients "
        f"and AdamW's state have {4 * sum(blocks_mb):,.0f} MB:"
    )
    return Sizes(claims=claims, notes=[about, table(head, rows)])


def memory_by_precision(workers: int = 2) -> Sizes:
    """Measure what workers gather, and their peak, with and without autocast to bfloat16."""
    job = GPT(layers=LAYERS, width=WIDTH, heads=8, context=16)
    tiny = GPT(layers=LAYERS, width=8, heads=2, context=16)
    found, rows = {}, []
    for precision in PRECISIONS:
        overrides = ["strategy=fsdp", f"strategy.num_workers={workers}", f"train.precision={precision}"]
        floor, held = observe(tiny, overrides), observe(job, overrides)
        peak_mb = max(worker.peak_mb - low.peak_mb for worker, low in zip(held, floor, strict=True))
        found[precision] = peak_mb, held[0].gathered_mb
        rows.append([precision, *(f"{mb:,.1f}" for mb in found[precision])])
    (exact_mb, exact_gathered_mb), (peak_mb, gathered_mb) = (found[precision] for precision in PRECISIONS)
    claims = [
        Claim(name="bytes gathered, bf16 / fp32", ratios=[gathered_mb / exact_gathered_mb], at_most=0.55),
        Claim(name="peak of a worker, bf16 / fp32", ratios=[peak_mb / exact_mb], at_most=1.0),
    ]
    about = f"the same model by precision, {workers} workers:"
    return Sizes(claims=claims, notes=[about, table(["precision", "peak, MB", "gathered in all steps, MB"], rows)])


def observe(job: GPT, overrides: Sequence[str]) -> list[WorkerMemory]:
    """Train for a few steps and return the memory of each rank."""
    return forked.train([*overrides, "job=gpt", "train.steps=7", "train.global_batch_size=4"], job, measure)


def measure(strategy: Strategy, config: Config) -> WorkerMemory:
    """Run the steps on one worker and measure its memory; a function for :func:`forked.train`."""
    with Gathered() as gathered:
        forked.time_steps(strategy, config)
    stored = sum(size.size_bytes for size in strategy.tensor_sizes() if size.kind in STORED)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return WorkerMemory(peak_mb=peak_mb, stored_mb=stored / 1e6, gathered_mb=gathered.num_bytes / 1e6)


if __name__ == "__main__":
    main()
