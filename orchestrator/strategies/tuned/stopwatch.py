"""Times of repeated calls, and their mean over the ranks that make them together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

MEASURED_S = 0.3
"""A call is repeated for this long, at most ``MOST_RUNS`` and at least ``LEAST_RUNS`` times."""
LEAST_RUNS, MOST_RUNS = 3, 40


def now(device: torch.device) -> float:
    """Return the time in seconds at which ``device`` has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def median_ms(call: Callable[[], object], device: torch.device, *, runs: int | None = None) -> float:
    """Return the median time of ``call`` in milliseconds, after one call that is not timed.

    ``runs``: the number of timed calls, for calls that other ranks have to make as often; None for as many as there is
    time for.
    """
    call()
    times: list[float] = []
    began = now(device)
    while len(times) < (runs or LEAST_RUNS) or (
        runs is None and len(times) < MOST_RUNS and time.perf_counter() - began < MEASURED_S
    ):
        start = now(device)
        call()
        times.append((now(device) - start) * 1e3)
    return statistics.median(times)


def mean_over(ranks: int, value: float, group: dist.ProcessGroup | None) -> float:
    """Return the mean of ``value`` over ``ranks`` members of ``group``, all others of which give 0. Collective.

    ``group`` is one of the hosts; None with one worker.
    """
    total = torch.tensor(value, dtype=torch.float64)
    if group is not None:
        dist.all_reduce(total, group=group)
    return float(total) / ranks
