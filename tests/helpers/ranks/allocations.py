"""What a piece of code allocates, counted byte by byte."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.compat.torch import FakeTensor, storage_key


class Allocations(TorchDispatchMode):
    """Counts the memory of tensors on a device that are made while it is entered.

    The tensors of a CPU are real, and those of a GPU fake.

    Attributes:
        peak_bytes: the most that there was at one time.
    """

    def __init__(self, device: Literal["cpu", "cuda"] = "cpu") -> None:
        super().__init__()
        self.peak_bytes = 0
        self._device = device
        self._present: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_key(memory) for memory in self._memory((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for memory in self._memory(out):
            if (key := storage_key(memory)) not in given:
                self._present[key] = StorageWeakRef(memory), memory.nbytes()
        self._present = {at: (ref, size) for at, (ref, size) in self._present.items() if not ref.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._present.values()))
        return out

    @property
    def present_bytes(self) -> int:
        """What there is now, of memory whose size may have changed."""
        memory = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref, _ in self._present.values())
        return sum(storage.nbytes() for storage in memory if storage is not None)

    def _memory(self, values: Any) -> Iterator[torch.UntypedStorage]:
        """Yield the memory of tensors, and not of a subclass without memory of its own."""
        types = (Tensor, nn.Parameter) if self._device == "cpu" else (FakeTensor,)
        for value in pytree.tree_leaves(values):
            if type(value) in types and value.device.type == self._device:
                yield value.untyped_storage()
            elif isinstance(value, torch.UntypedStorage) and value.device.type == self._device:
                yield value
