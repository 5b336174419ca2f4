"""The ceiling C: the rate of two pinned single-threaded copies of a training step over the rate of one copy.

python benchmarks/ceiling.py
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier

import torch
from harness.disturbance import undisturbed
from torch import nn
from torch.nn import functional as F

SECONDS = 2.0
_context = multiprocessing.get_context("fork")


def ceiling(*, rounds: int = 3) -> float:
    """Return C, the median of ``rounds`` measurements; 2.0 on two cores that share nothing.

    Raises:
        SystemExit: see :func:`undisturbed`.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]

    def measure() -> float:
        return sum(_steps_per_s(cores)) / sum(_steps_per_s(cores[:1]))

    return statistics.median(undisturbed(measure) for _ in range(rounds))


def _steps_per_s(cores: Sequence[int]) -> list[float]:
    ready, rates = _context.Barrier(len(cores)), _context.SimpleQueue()
    copies = [_context.Process(target=_copy, args=(core, ready, rates)) for core in cores]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.join()
    return [rates.get() for _ in copies]


def _copy(core: int, ready: Barrier, rates: SimpleQueue[float]) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    inputs, target = torch.randn(64, 64), torch.randint(10, (64,))

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(inputs), target).backward()

    for _ in range(20):
        step()
    ready.wait(timeout=60)
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        step()
        steps += 1
    rates.put(steps / (time.perf_counter() - start))


if __name__ == "__main__":
    print(f"C = {ceiling():.2f}")
