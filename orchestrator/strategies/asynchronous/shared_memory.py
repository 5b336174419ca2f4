"""Tensors that every rank of a node maps: anonymous memory, which the kernel takes back when the last rank is gone.

It has no name in any file system, so that nothing is left behind however the ranks end. A rank that comes later finds
it through the descriptor of one that has it.
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

from orchestrator.state.transport import broadcast_json

_ALIGNMENT = 64


class SharedMemory:
    """``tensors`` in memory that several processes of one machine have in common.

    ``path``: where the memory of another process is found, which was made with tensors of the same names, shapes and
    types; None: it is new, and has the values of these.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, path: str | None = None):
        sizes = {name: -(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for name, t in tensors.items()}
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
        """Where other processes find it as long as this object lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time; the kernel frees the lock of one that dies, also where it has children."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


def in_common(own: SharedMemory | None, tensors: Mapping[str, Tensor], *, rank: int, world_size: int) -> SharedMemory:
    """The memory that all ranks of the default group have in common: what those have that come with some, ``own``; if
    none does, new memory with the values of rank 0. All ranks call it."""
    first = torch.tensor(world_size if own is None else rank)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    source = int(first) % world_size
    if own is None and rank == source:
        own = SharedMemory(tensors)
    here = None if own is None else own.path
    path = broadcast_json(here, source=source, rank=rank, device=torch.device("cpu"))
    if own is None:
        own = SharedMemory(tensors, path=path)
    dist.barrier()  # until everybody has it, nobody may change it or leave
    return own
