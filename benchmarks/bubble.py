"""The measured bubble of each schedule beside the formula of its paper, in pipelines of 4 and 8 sleeping workers.

python benchmarks/bubble.py
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from harness.disturbance import undisturbed
from harness.forked import train
from harness.rounds import Claim, argument_parser, report, table
from torch.utils.data import DataLoader

from jobs.sleep import Sleep
from orchestrator.config.schema import Config
from orchestrator.planning.schedules import SCHEDULES
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.mesh_trainer import MeshTrainer
from orchestrator.strategies.parts.stages import Stages
from orchestrator.timeline import Span, bubble, theoretical_bubble

GRIDS = ((4, 8), (8, 8))
"""``(workers, microbatches)``"""
STAGES_PER_WORKER = {
    "GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2,
    "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2, "DualPipeV": 2,
}  # fmt: skip
WITH_FORMULA = ("GPipe", "1F1B", "Interleaved1F1B")
"""Bubble (p - 1) / (v m + p - 1) with p workers, v stages on each and m micro-batches."""
FORWARD_MS = 100.0
"""Forward time of a micro-batch on one worker, over all its stages; backward takes twice as long."""
STEPS = 3


@dataclass(frozen=True, kw_only=True)
class WorkerTrace:
    """One worker's spans in each step, and the largest number of micro-batches that its first stage held at once."""

    steps: Sequence[Sequence[Span]]
    live: int


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    claims: list[Claim] = []
    rows: list[list[str]] = []
    for workers, microbatches in GRIDS:
        measured: dict[str, list[float]] = {}
        for schedule, v in STAGES_PER_WORKER.items():
            if SCHEDULES[schedule].microbatches_error(microbatches, v * workers, workers):
                continue
            steps = 1 if arguments.quick else STEPS
            traces = undisturbed(partial(observe, schedule, workers, microbatches, steps=steps))
            spans = list(zip(*(trace.steps for trace in traces), strict=True))
            measured[schedule] = [100 * bubble(step) for step in spans]
            formula = 100 * (workers - 1) / (v * microbatches + workers - 1)
            if schedule in WITH_FORMULA:
                excess = [value - formula for value in measured[schedule]]
                name = f"{schedule}, {workers} workers: measured - formula, points"
                claims.append(Claim(name=name, ratios=excess, at_most=3.0))
            rows.append([
                f"{workers} x {microbatches}", schedule, f"{formula:.1f}" if schedule in WITH_FORMULA else "",
                f"{100 * theoretical_bubble(spans[0]):.1f}", f"{statistics.median(measured[schedule]):.1f}",
                str(traces[0].live), str(traces[-1].live),
            ])  # fmt: skip
            print("  " + ", ".join(rows[-1]), flush=True)
        for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble"):
            shares = [a / b for a, b in zip(measured[schedule], measured["1F1B"], strict=True)]
            claims.append(Claim(name=f"{schedule} / 1F1B, {workers} workers", ratios=shares, at_most=1.0))
    notes = (
        "All stages sleep, so that workers do not compete for cores. Ideal: every action starts as soon as its inputs "
        "are available; forward takes 1, backward 2, each half of a backward 1. Torch's implementation differs in two "
        "points: stage 0, which has no predecessor, runs its whole backward in the half for the weights; DualPipeV "
        "sends the results of an overlapped pair of passes after both have finished."
    )
    head = ["workers x micro-batches", "schedule", "formula, %", "ideal, %", "measured, %",
            "peak micro-batches, first worker's first stage", "last worker's"]  # fmt: skip
    report("bubble", claims, ceiling=None, rounds={}, notes=f"{table(head, rows)}\n\n{notes}", keep=not arguments.quick)


def observe(schedule: str, workers: int, microbatches: int, *, steps: int) -> list[WorkerTrace]:
    """Run a pipeline and return the trace of each rank, without the first step, which sets up the connections."""
    layers = workers * STAGES_PER_WORKER[schedule]
    overrides = [
        "strategy=pipeline",
        f"strategy.num_workers={workers}",
        f"strategy.schedule={schedule}",
        f"strategy.num_microbatches={microbatches}",
        f"strategy.split=[{','.join(f'layer{n}' for n in range(1, layers))}]",
        "job=sleep",
        f"train.steps={1 + steps}",
        f"train.global_batch_size={microbatches}",
    ]
    return train(overrides, Sleep(layers=layers, forward_ms=FORWARD_MS / STAGES_PER_WORKER[schedule]), record)


def record(strategy: Strategy, config: Config) -> WorkerTrace:
    """Run the steps on one worker and record its spans; a function for :func:`forked.train`."""
    assert isinstance(strategy, MeshTrainer)
    assert isinstance(strategy.part, Stages)
    loader = DataLoader(strategy.job.dataset("train"), config.train.global_batch_size)
    steps = []
    for _, batch in zip(range(config.train.steps), loader, strict=False):
        strategy.train_step([batch], want_grad_norm=False, want_metrics=True)
        steps.append(strategy.spans())
    return WorkerTrace(steps=steps[1:], live=strategy.part.timed_stages[0].live)


if __name__ == "__main__":
    main()
