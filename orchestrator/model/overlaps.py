"""Different tensors of a model with memory in common, such as weights tied by ``a.weight.data = b.weight.data``."""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch
from torch import Tensor, nn

from orchestrator.compat.torch import hooks_of, storage_key
from orchestrator.model.tensor_slots import TensorSlot, tensor_slots


def overlap_in(model: nn.Module) -> tuple[str, str] | None:
    """Return the names of a trainable parameter and of another tensor that share elements; None if there are none.

    A parameter with several names is one tensor. The model may have no memory, as on the meta device.
    """
    by_storage: defaultdict[int, dict[int, TensorSlot]] = defaultdict(dict)
    for slot in tensor_slots(model):
        if slot.tensor.layout == torch.strided and not _may_be_replaced(slot):
            by_storage[storage_key(slot.tensor.untyped_storage())].setdefault(id(slot.tensor), slot)
    for slots in by_storage.values():
        for one, other in itertools.combinations(slots.values(), 2):
            if (_is_trained(one.tensor) or _is_trained(other.tensor)) and _share_elements(one.tensor, other.tensor):
                return one.name, other.name
    return None


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _may_be_replaced(slot: TensorSlot) -> bool:
    """Return whether a hook may set this plain attribute before each call, as ``spectral_norm`` of torch does."""
    return slot.attribute in vars(slot.owner) and bool(hooks_of(slot.owner))


def _share_elements(one: Tensor, other: Tensor) -> bool:
    if one.numel() == 0 or other.numel() == 0:
        return False
    spans = [_span(one), _span(other)]
    low, high = min(start for start, _ in spans), max(end for _, end in spans)
    if sum(end - start for start, end in spans) <= high - low:
        return False
    marks = torch.zeros(high - low, dtype=torch.bool, device="cpu")  # of bytes
    views = [
        marks.as_strided((*t.shape, t.itemsize), (*(s * t.itemsize for s in t.stride()), 1), start - low)
        for t, (start, _) in zip((one, other), spans, strict=True)
    ]
    views[0].fill_(True)
    return bool(views[1].any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    last: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.itemsize, (start + last + 1) * tensor.itemsize
