"""Gather the rows of all workers, for a loss over the whole global batch such as a contrastive one."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.compat.torch import as_bytes

_in_training_step = False


def gather_batch(tensor: Tensor) -> Tensor:
    """Return the rows of all workers, in the order of their ranks. To be called in ``Job.training_step``.

    Every worker has to call it with its own share of the batch, and then to compute the same loss from the result. The
    gradients of that loss are then exact in each step of an optimizer, also for parameters of the loss itself. Returns
    ``tensor`` itself on a single worker and in an evaluation.

    Args:
        tensor: shape ``(rows, ...)``; the number of rows may differ between workers.

    Raises:
        ValueError: the rows differ in shape or type between workers.
        RuntimeError: it is called in training, but not in ``Job.training_step``.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor
    if _in_training_step:
        gather: Any = _Gather.apply
        rows: Tensor = gather(tensor)
        return rows
    if torch.is_grad_enabled():
        raise RuntimeError("gather_batch: only Job.training_step can gather the rows of all workers; compute it there")
    return tensor


@contextlib.contextmanager
def training_step() -> Iterator[None]:
    """Let :func:`gather_batch` gather: in this context, all ranks make the same calls."""
    global _in_training_step
    _in_training_step = True
    try:
        yield
    finally:
        _in_training_step = False


class _Gather(torch.autograd.Function):
    """Gathers rows. The gradient is scaled for gradients that are then averaged by the rows of each rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:
            raise ValueError("gather_batch: expected a tensor with a row for each sample, got a scalar")
        world_size, rank = dist.get_world_size(), dist.get_rank()
        shape = list(tensor.shape[1:])
        own = torch.tensor([len(tensor), zlib.crc32(f"{tensor.dtype} {shape}".encode())], device=tensor.device)
        of_ranks = own.new_empty(world_size, 2)
        dist.all_gather(list(of_ranks.unbind()), own)
        rows, digests = (column.tolist() for column in of_ranks.unbind(1))
        if len(set(digests)) > 1:
            raise ValueError(
                f"gather_batch: the rows of the workers differ in shape or type; those of rank {rank} are "
                f"{tensor.dtype} of shape {shape}"
            )
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in range(world_size)]
        # As bytes, because not every backend supports every type.
        dist.all_gather([as_bytes(t) for t in gathered], as_bytes(padded))
        ctx.start, ctx.rows, ctx.total = sum(rows[:rank]), rows[rank], sum(rows)
        return torch.cat([t[:n] for t, n in zip(gathered, rows, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        own: Tensor = gradient[ctx.start : ctx.start + ctx.rows] * (ctx.total / max(1, ctx.rows))
        return own
