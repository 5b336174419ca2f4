"""Tensors that every rank of a node maps: anonymous memory, which the kernel takes back when the last rank is gone.

It has no name in any file system, so that nothing is left behind however the ranks end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.worker.transfer import broadcast_json

_ALIGNMENT = 64


class SharedMemory:
    """``tensors`` in memory that all ranks of the default group have in common, with rank 0's values.

    Every rank passes tensors of the same names, shapes and types; all ranks are processes of one machine.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, rank: int):
        sizes = {name: -(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for name, t in tensors.items()}
        total = max(1, sum(sizes.values()))
        made = os.memfd_create("orchestrator") if rank == 0 else -1
        try:
            if rank == 0:
                os.ftruncate(made, total)
            here = f"/proc/{os.getpid()}/fd/{made}"
            path = broadcast_json(here, source=0, rank=rank, device=torch.device("cpu"))
            self._descriptor = os.open(path, os.O_RDWR)  # of its own: a lock belongs to what was opened
            memory = torch.from_file(path, shared=True, size=total, dtype=torch.uint8)
            self.tensors: dict[str, Tensor] = {}
            offset = 0
            for name, tensor in tensors.items():
                view = memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                if rank == 0:
                    view.copy_(tensor)
                self.tensors[name] = view
                offset += sizes[name]
            dist.barrier()  # everybody has mapped it, and it has rank 0's values
        finally:
            if rank == 0:
                os.close(made)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One rank at a time; the kernel frees the lock of a rank that dies."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give up the lock's file; the tensors stay usable."""
        os.close(self._descriptor)
