"""Which tensors may take other values in place, because nothing else sees their memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from orchestrator.compat.torch import storage_key


def with_own_memory(tensors: Mapping[str, Tensor], others: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return those of ``tensors`` whose elements have memory of their own, which none of the ``others`` has either.

    They may be views of one storage, as those of a flat buffer are.
    """
    every = [*tensors.values(), *others]
    shared = {number for number, tensor in enumerate(every) if tensor.layout != torch.strided or _repeats(tensor)}
    places = sorted((*_place(every[number]), number) for number in {*range(len(every))} - shared)
    before, reached, last = -1, 0, -1
    for storage, begin, end, number in places:
        if storage == before and begin < reached:
            shared |= {number, last}
        if storage != before or end > reached:
            before, reached, last = storage, end, number
    return {name: tensor for number, (name, tensor) in enumerate(tensors.items()) if number not in shared}


def _place(tensor: Tensor) -> tuple[int, int, int]:
    """Return the storage of a tensor, and where in it the tensor begins and ends, in bytes."""
    begin = int(tensor.storage_offset())
    reach = sum((int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    first, last = begin * tensor.itemsize, (begin + reach + 1) * tensor.itemsize
    return storage_key(tensor.untyped_storage()), first, last


def _repeats(tensor: Tensor) -> bool:
    """Return whether elements share their memory, as those of an expanded tensor do."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
