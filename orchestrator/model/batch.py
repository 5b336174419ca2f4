"""Batches of nested tensors: move them to a device, take their first samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors in nested tuples, named tuples, lists and dicts to ``device``.

    Copies from pinned memory are asynchronous. On the CPU, returns ``batch`` itself.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def first_rows(value: Any, rows: int) -> Any:
    """Cut each tensor in nested tuples, lists and dicts to its first ``rows`` samples; scalars stay as they are."""
    if isinstance(value, Tensor):
        return value[:rows] if value.dim() else value
    if isinstance(value, dict):
        return {k: first_rows(v, rows) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(first_rows(v, rows) for v in value)
    return value
