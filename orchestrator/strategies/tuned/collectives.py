"""What collective operations and a message cost, as functions of their size in MiB. Collective."""

from __future__ import annotations

import functools
import math

import torch
import torch.distributed as dist

from orchestrator.strategies.base import Context
from orchestrator.strategies.groups import new_group
from orchestrator.strategies.tuned.stopwatch import mean_over, medians_ms
from orchestrator.tuning.profile import MIB, Affine, GroupCost, fit

SIZES_MIB = (1 / 256, 1 / 4, 4, 16)
RUNS = 8


def group_cost(workers: int, context: Context, control: dist.ProcessGroup) -> GroupCost:
    """Measure the first ``workers`` ranks; ``control`` is a group of all ranks on the hosts."""
    group = new_group(context, range(workers))
    takes_part = context.global_rank < workers
    points: list[list[tuple[float, float]]] = [[], [], []]
    for size in SIZES_MIB:
        part = torch.zeros(math.ceil(size * MIB / 4 / workers), device=context.device)
        whole = torch.zeros(len(part) * workers, device=context.device)
        calls = (
            functools.partial(dist.all_reduce, whole, group=group),
            functools.partial(dist.all_gather_into_tensor, whole, part, group=group),
            functools.partial(dist.reduce_scatter_tensor, part, whole, group=group),
        )
        times = medians_ms(calls, context.device, runs=RUNS) if takes_part else (0.0,) * len(calls)
        for found, own_ms in zip(points, times, strict=True):
            found.append((size, mean_over(workers, own_ms, control)))
    all_reduce, all_gather, reduce_scatter = map(fit, points)
    return GroupCost(workers=workers, all_reduce=all_reduce, all_gather=all_gather, reduce_scatter=reduce_scatter)


def message_cost(context: Context, control: dist.ProcessGroup) -> Affine:
    """Measure a message from rank 0 to rank 1 by its way there and back."""
    rank = context.global_rank
    points = []
    for size in SIZES_MIB:
        values = torch.zeros(int(size * MIB / 4), device=context.device)
        call = functools.partial(_echo, values, rank)
        (own_ms,) = medians_ms([call], context.device, runs=RUNS) if rank < 2 else (0.0,)
        points.append((size, mean_over(2, own_ms, control) / 2))
    return fit(points)


def _echo(values: torch.Tensor, rank: int) -> None:
    for sender in (0, 1):
        if rank == sender:
            dist.send(values, dst=1 - sender)
        else:
            dist.recv(values, src=sender)
