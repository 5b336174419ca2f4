"""The bubbles of the schedules as measured, beside the papers' formulas: pipelines of 4 and 8 workers that sleep.

python benchmarks/bubble.py
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from forked import train
from rounds import Claim, argument_parser, report, table
from torch.utils.data import DataLoader

from jobs.sleep import Sleep
from orchestrator.config.schema import Config
from orchestrator.planning.schedules import SCHEDULES
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.pipelined.pipeline import Pipeline
from orchestrator.timeline.ideal import theoretical_bubble
from orchestrator.timeline.spans import Span, bubble

GRIDS = ((4, 8), (8, 8))
"""``(workers, microbatches)``"""
STAGES_PER_WORKER = {
    "GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2,
    "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2, "DualPipeV": 2,
}  # fmt: skip
WITH_FORMULA = ("GPipe", "1F1B", "Interleaved1F1B")
FORWARD_MS = 100.0
"""Of a micro-batch on a worker, all its stages together; backward takes twice as long."""
STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Of a worker: its spans of each step, and the micro-batches that its first stage held at most."""

    steps: Sequence[Sequence[Span]]
    live: int


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    claims: list[Claim] = []
    rows: list[list[str]] = []
    for workers, microbatches in GRIDS:
        measured: dict[str, list[float]] = {}
        for schedule, v in STAGES_PER_WORKER.items():
            if SCHEDULES[schedule].microbatches_fault(microbatches, v * workers, workers):
                continue
            seen = observe(schedule, workers, microbatches, steps=1 if arguments.quick else STEPS)
            steps = list(zip(*(s.steps for s in seen), strict=True))
            measured[schedule] = [100 * bubble(step) for step in steps]
            formula = 100 * (workers - 1) / (v * microbatches + workers - 1)
            if schedule in WITH_FORMULA:
                over = [value - formula for value in measured[schedule]]
                name = f"{schedule}, {workers} workers: measured - formula, points"
                claims.append(Claim(name=name, ratios=over, at_most=3.0))
            rows.append([
                f"{workers} x {microbatches}", schedule, f"{formula:.1f}" if schedule in WITH_FORMULA else "",
                f"{100 * theoretical_bubble(steps[0]):.1f}", f"{statistics.median(measured[schedule]):.1f}",
                str(seen[0].live), str(seen[-1].live),
            ])  # fmt: skip
            print("  " + ", ".join(rows[-1]), flush=True)
        for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble"):
            shares = [a / b for a, b in zip(measured[schedule], measured["1F1B"], strict=True)]
            claims.append(Claim(name=f"{schedule} / 1F1B, {workers} workers", ratios=shares, at_most=1.0))
    notes = (
        "All stages sleep, so that workers need no cores of their own. Theory: every action as soon as what it needs "
        "is there, forward 1, backward 2, its halves 1 each. Two things differ as torch carries them out: stage 0, "
        "with no stage before it, does all of a backward pass in the half for the weights; what a pair of passes of "
        "DualPipeV gives is sent after both."
    )
    head = ["workers x micro-batches", "schedule", "formula, %", "its order in theory, %", "measured, %",
            "micro-batches held by the first worker's first stage", "by the last worker's"]  # fmt: skip
    report("bubble", claims, ceiling=None, rounds={}, notes=f"{table(head, rows)}\n\n{notes}", keep=not arguments.quick)


def observe(schedule: str, workers: int, microbatches: int, *, steps: int) -> list[Seen]:
    """A pipeline, by rank; its first step, which connects the workers, is left out."""
    layers = workers * STAGES_PER_WORKER[schedule]
    words = [
        "strategy=pipeline",
        f"strategy.num_workers={workers}",
        f"strategy.schedule={schedule}",
        f"strategy.num_microbatches={microbatches}",
        f"strategy.split=[{','.join(f'layer{n}' for n in range(1, layers))}]",
        "job=sleep",
        f"train.steps={1 + steps}",
        f"train.global_batch_size={microbatches}",
    ]
    return train(words, Sleep(layers=layers, forward_ms=FORWARD_MS / STAGES_PER_WORKER[schedule]), watch)


def watch(strategy: Strategy, config: Config) -> Seen:
    assert isinstance(strategy, Pipeline)
    loader = DataLoader(strategy.job.dataset("train"), config.train.global_batch_size)
    steps = []
    for _, batch in zip(range(config.train.steps), loader, strict=False):
        strategy.train_step([batch], want_grad_norm=False)
        steps.append(strategy.spans())
    return Seen(steps=steps[1:], live=strategy.timed_stages[0].live)


if __name__ == "__main__":
    main()
