"""Tensors in memory that all ranks of a node map, and Adagrad, which several processes update there without a lock.

The memory is anonymous (``memfd_create``): it has no name in any file system, and the kernel frees it when the last
rank ends, however that happens. A rank that joins later opens it through the file descriptor of a rank that has it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Adagrad

from orchestrator.state.transport import CPU, broadcast_json

_CACHE_LINE_BYTES = 64


class SharedMemory:
    """Memory that several processes of one machine map.

    Attributes:
        tensors: views of the memory, by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, path: str | None = None):
        """Create shared memory with the values of ``tensors``, or map existing memory.

        Args:
            tensors: names, shapes and dtypes. They must be equal in all processes that map the memory.
            path: :attr:`path` of the memory in a process that has it, or None to create new memory.
        """
        sizes = {name: -(-t.nbytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES for name, t in tensors.items()}
        total = max(1, sum(sizes.values()))
        self._descriptor = os.memfd_create("orchestrator") if path is None else os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._descriptor)
        if path is None:
            os.ftruncate(self._descriptor, total)
        memory = torch.from_file(self.path, shared=True, size=total, dtype=torch.uint8)
        self.tensors: dict[str, Tensor] = {}
        offset = 0
        for name, tensor in tensors.items():
            view = memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            if path is None:
                view.copy_(tensor)
            self.tensors[name] = view
            offset += sizes[name]

    @property
    def path(self) -> str:
        """The path under which other processes can open the memory while this object exists."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold a lock that excludes all other processes.

        It is a POSIX record lock: the kernel releases it when its process dies, even if child processes survive.
        """
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


def map_shared(
    existing: SharedMemory | None, tensors: Mapping[str, Tensor], *, rank: int, world_size: int
) -> SharedMemory:
    """Return memory that all ranks of the default group map. Collective.

    Args:
        existing: the memory that this rank has from an earlier generation, or None.
        tensors: names, shapes and dtypes of the tensors, and the values of new memory.

    Returns:
        The memory of the ranks that have one; if none has, new memory with the values of rank 0.
    """
    first = torch.tensor(world_size if existing is None else rank)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    source = int(first) % world_size
    if existing is None and rank == source:
        existing = SharedMemory(tensors)
    own_path = None if existing is None else existing.path
    path = broadcast_json(own_path, source=source, rank=rank, device=CPU)
    if existing is None:
        existing = SharedMemory(tensors, path=path)
    dist.barrier()  # no rank may change the memory or leave before all have mapped it
    return existing


@torch.no_grad()
def take_gradients(optimizer: Adagrad) -> None:
    """Make the update of ``optimizer.step()``, which finds no gradients afterwards, except complex ones.

    torch adds the square of a gradient to its sum, and divides by the root of what it reads back. If another process
    has overwritten that with a sum without this gradient, the quotient has no bound: sums begin at zero. Here a process
    divides by the sum that it has computed, so that no quotient is larger than 1.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is None or gradient.is_complex():
                continue
            state, parameter.grad = optimizer.state[parameter], None
            if group["maximize"]:
                gradient = -gradient
            if group["weight_decay"]:
                gradient = gradient.add(parameter, alpha=group["weight_decay"])
            state["step"] += 1
            rate = group["lr"] / (1 + (float(state["step"]) - 1) * group["lr_decay"])
            if gradient.is_sparse:
                gradient = gradient.coalesce()
                values = gradient.values()
                squares = values.square()
                roots = (state["sum"].sparse_mask(gradient).values() + squares).sqrt_().add_(group["eps"])
                squares, quotients = (
                    torch.sparse_coo_tensor(gradient.indices(), made, gradient.shape, is_coalesced=True)
                    for made in (squares, values / roots)
                )
                state["sum"].add_(squares)
                parameter.add_(quotients, alpha=-rate)
            else:
                squares = gradient.square()
                roots = (state["sum"] + squares).sqrt_().add_(group["eps"])
                state["sum"].add_(squares)
                parameter.addcdiv_(gradient, roots, value=-rate)
