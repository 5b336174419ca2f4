"""The bubbles of the schedules as measured, beside the papers' formulas: pipelines of 4 and 8 workers that sleep.

python benchmarks/bubble.py
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
from rounds import Claim, argument_parser, report, table
from torch.utils.data import DataLoader

from jobs.sleep import Sleep
from orchestrator.config.compose import compose
from orchestrator.config.schema import Config
from orchestrator.plan import Node, Plan, make_plan
from orchestrator.schedule_model import theoretical_bubble
from orchestrator.schedules import SCHEDULES
from orchestrator.spans import Span, bubble
from orchestrator.strategies.base import Context
from orchestrator.strategies.pipeline import Pipeline

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
TIMEOUT_S = 120

_context = multiprocessing.get_context("fork")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Of a worker: its spans of each step, and the micro-batches that its first stage held at most."""

    rank: int
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
    """A pipeline of processes with gloo, by rank; its first step, which connects them, is left out.

    Raises:
        RuntimeError: a worker failed or took longer than ``TIMEOUT_S``.
    """
    layers = workers * STAGES_PER_WORKER[schedule]
    faults: list[str] = []
    config, _ = compose(
        [
            "strategy=pipeline",
            f"strategy.num_workers={workers}",
            f"strategy.schedule={schedule}",
            f"strategy.num_microbatches={microbatches}",
            f"strategy.split=[{','.join(f'layer{n}' for n in range(1, layers))}]",
            "job=sleep",
            f"train.steps={1 + steps}",
            f"train.global_batch_size={microbatches}",
        ],
        faults,
    )
    if config is None or faults:
        raise RuntimeError("\n".join(faults))
    job = Sleep(layers=layers, forward_ms=FORWARD_MS / STAGES_PER_WORKER[schedule])
    plan = make_plan(config, (Node(node_id="here", name="here", cpus=workers, gpus=0),), oversubscribe_cpus=True)
    results: SimpleQueue[Seen] = _context.SimpleQueue()
    with tempfile.NamedTemporaryFile(prefix="bubble-") as store:  # a store that needs no thread, before the forks
        processes = [
            _context.Process(target=_work, args=(rank, config, plan, job, store.name, results))
            for rank in range(workers)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + TIMEOUT_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    for process in processes:
        process.kill()
    if failed:
        raise RuntimeError(f"{schedule}: ranks {failed} failed")
    return sorted((results.get() for _ in processes), key=lambda s: s.rank)


def _work(rank: int, config: Config, plan: Plan, job: Sleep, store: str, results: SimpleQueue[Seen]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, plan.world_size), rank=rank, world_size=plan.world_size)
    context = Context(
        mesh=plan.mesh,
        global_rank=rank,
        device=torch.device("cpu"),
        seed=0,
        train=config.train,
        options=config.strategy,
        pipeline=plan.pipeline,
    )
    strategy = Pipeline(context, job)
    dataset = job.dataset("train")
    strategy.setup(dataset)
    steps = []
    for _, batch in zip(range(config.train.steps), DataLoader(dataset, config.train.global_batch_size), strict=False):
        strategy.train_step([batch], want_grad_norm=False)
        steps.append(strategy.spans())
    results.put(Seen(rank=rank, steps=steps[1:], live=strategy.timed_stages[0].live))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
