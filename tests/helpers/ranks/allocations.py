"""What a piece of code allocates, counted byte by byte."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Counts the memory of tensors on the CPU that are made while it is entered.

    Attributes:
        peak_bytes: the most that there was at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._present: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {memory.data_ptr() for memory in map(_memory, pytree.tree_leaves((args, kwargs))) if memory is not None}
        out = func(*args, **(kwargs or {}))
        for memory in map(_memory, pytree.tree_leaves(out)):
            if memory is not None and memory.data_ptr() not in given:
                self._present[memory.data_ptr()] = StorageWeakRef(memory), memory.nbytes()
        self._present = {at: (ref, size) for at, (ref, size) in self._present.items() if not ref.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._present.values()))
        return out

    @property
    def present_bytes(self) -> int:
        """What there is now, of memory whose size may have changed."""
        memory = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref, _ in self._present.values())
        return sum(storage.nbytes() for storage in memory if storage is not None)


def _memory(value: Any) -> torch.UntypedStorage | None:
    if type(value) in (Tensor, nn.Parameter):  # and not of a subclass without memory of its own
        value = value.untyped_storage()
    return value if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu" else None
