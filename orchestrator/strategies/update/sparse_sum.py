"""The sum of sparse tensors over ranks, by exchanging rows: NCCL has no sparse all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def sparse_sum(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of a sparse tensor over the ranks of ``group``, coalesced. A collective operation.

    Each rank gathers the entries of all ranks and adds them in the order of the ranks, so that the result is the same
    everywhere.

    Args:
        tensor: a sparse COO tensor of the same shape, sparse dimensions and dtype on every rank.
        group: None for the default group.
    """
    own = tensor.coalesce()
    rows = own.values().shape[0]
    counts = _gathered(own.indices().new_full((1,), rows), [1] * dist.get_world_size(group), group).tolist()
    indices = _gathered(own.indices().T.contiguous(), counts, group).T
    values = _gathered(own.values(), counts, group)
    return torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False).coalesce()


def _gathered(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the rows of all ranks, of which rank r has ``counts[r]``.

    Each rank sends as many as the largest count, because NCCL gathers messages of one size.
    """
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
