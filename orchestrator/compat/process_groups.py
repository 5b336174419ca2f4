"""Private parts of ``torch.distributed``. They are checked with torch 2.11, 2.13 and 2.15."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401 # its defaults keep the default group of when it is imported
from torch import Tensor
from torch._C import _distributed_c10d as c10d_bindings
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed import distributed_c10d

from orchestrator.compat.backends import nccl_backend
from orchestrator.compat.enqueue_gate import GATE

_CONNECTION_ERRORS = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError, ConnectionError)
_CONNECTION_TEXTS = (
    *("Connection closed by peer", "Connection reset by peer", "Read error", "Timed out"),  # gloo
    # nccl2 of torch 2.15, of which the older backend would make a DistBackendError.
    *("NCCL Last Error: ", "NCCL operation timed out", "NCCL communicator was aborted after a previous error"),
    "Failed to initialize NCCL communicator",
)
"""What a ``RuntimeError`` says if the connection to another rank has broken."""


def is_broken_connection(error: BaseException) -> bool:
    """Return whether the error looks like a broken connection to another rank."""
    return isinstance(error, _CONNECTION_ERRORS) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _CONNECTION_TEXTS)
    )


def abort_process_groups() -> list[dist.ProcessGroup]:
    """Abort all process groups of this process, which waits for no other rank.

    Returns:
        The groups. Keep them until nothing else refers to them: the last owner's destructor waits for the threads of
        gloo, and for the threads of torch that watch NCCL.

    Raises:
        RuntimeError: NCCL could not abort a communicator within the timeout of its operations, or a group has an
            unknown backend. The groups remain.
    """
    groups = list(distributed_c10d._world.pg_names)
    abort_together([backend for group in groups if (backend := nccl_backend(group)) is not None])
    distributed_c10d._abort_process_group()  # what NCCL has aborted is not aborted again
    return groups


def abort_together(backends: Sequence[Any]) -> None:
    """Abort the communicators of several backends, each on a thread of its own, and wait for all.

    An abort frees device memory, which waits for all kernels of the device. One of them may be a collective operation
    of another communicator, which only ends when that one is aborted too. torch aborts one after the other: its group
    call for NCCL has no effect, because it belongs to the calling thread, and each abort runs on another one.
    """
    if backends:
        with ThreadPoolExecutor(len(backends), thread_name_prefix="abort") as pool:
            list(pool.map(lambda backend: backend.abort(), backends))


def new_nccl_group(ranks: Sequence[int], *, timeout: timedelta) -> dist.ProcessGroup:
    """Form a group of some ranks, with a communicator that is connected at once. Every rank calls this.

    torch would divide the communicator of the default group. In ``new_group``, all ranks then take part for each group,
    also those outside it. ``split_group`` ends the process by SIGSEGV if it has had another default group before,
    because torch gives the ranks of a default group to the first one only (torch 2.11, ``ProcessGroupNCCL::split``).
    """
    world = dist.group.WORLD
    assert world is not None
    device = world.bound_device_id
    assert device is not None
    world.bound_device_id = None  # which says that there is nothing to divide
    try:
        group = cast(dist.ProcessGroup, dist.new_group(list(ranks), timeout=timeout))
    finally:
        world.bound_device_id = device
    if dist.get_rank() in ranks:
        with GATE:
            group._get_backend(device).eager_connect_single_device(device)
    return group


def all_reduce_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> dist.Work:
    """Begin to replace each tensor by its sum over the ranks of ``group``, without a copy on GPUs.

    There it is one operation, and with nccl2 one for each tensor. The tensors are contiguous, and of one dtype.
    ``dist.all_reduce_coalesced`` does the same, with a warning.
    """
    return group.allreduce_coalesced(list(tensors), c10d_bindings.AllreduceCoalescedOptions())


def all_reduced(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of ``tensor`` over the ranks of ``group``, as an operation that compiled code can have."""
    total: Tensor = functional_collectives.all_reduce(tensor.contiguous(), "sum", group)
    total = functional_collectives.wait_tensor(total)
    return total


def all_gathered(part: Tensor, group: dist.ProcessGroup, *, axis: int) -> Tensor:
    """Return the parts of all ranks of ``group`` along an axis, as an operation that compiled code can have."""
    gather = getattr(functional_collectives, "all_gather_single", None) or functional_collectives.all_gather_tensor
    whole: Tensor = functional_collectives.wait_tensor(gather(part.contiguous(), axis % part.ndim, group))
    return whole


def reduce_scattered(tensor: Tensor, group: dist.ProcessGroup, *, axis: int) -> Tensor:
    """Return this rank's part along an axis of the sum over the ranks of ``group``, as compiled code can have it."""
    scatter = getattr(functional_collectives, "reduce_scatter_single", None)
    scatter = scatter or functional_collectives.reduce_scatter_tensor
    part: Tensor = functional_collectives.wait_tensor(scatter(tensor.contiguous(), "sum", axis % tensor.ndim, group))
    return part


def all_gather_single(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``whole`` with the ``part`` of each rank of a group. Its name in torch differs by version."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part, group=group)


def restart_group_numbers() -> None:
    """Number process groups from the beginning, as torch does after it has destroyed all of them.

    A group that could not be formed has taken a number. The ranks that have tried would look for the others under
    another name than new ones do.
    """
    distributed_c10d._world.group_count = 0
