"""Times of repeated calls, and their mean over the ranks that make them together."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

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


def medians_ms(
    calls: Sequence[Callable[[], object]], device: torch.device, *, runs: int | None = None
) -> tuple[float, ...]:
    """Return the median time of each call in milliseconds. They are made in turn, the first time without being timed.

    Args:
        calls: what to measure.
        device: where the calls compute.
        runs: how often to time each, if other ranks have to make the same calls; None for as often as there is time.
    """
    times: list[list[float]] = []
    began = now(device)
    while len(times) <= (runs or LEAST_RUNS) or (
        runs is None and len(times) <= MOST_RUNS and time.perf_counter() - began < MEASURED_S
    ):
        ends = [now(device)]
        for call in calls:
            call()
            ends.append(now(device))
        times.append([(end - start) * 1e3 for start, end in itertools.pairwise(ends)])
    return tuple(map(statistics.median, zip(*times[1:], strict=True)))


def mean_over(ranks: int, value: float, group: dist.ProcessGroup | None) -> float:
    """Return the mean of ``value`` over ``ranks`` members of ``group``, all others of which give 0. Collective.

    ``group`` is one of the hosts; None with one worker.
    """
    total = torch.tensor(value, dtype=torch.float64)
    if group is not None:
        dist.all_reduce(total, group=group)
    return float(total) / ranks
