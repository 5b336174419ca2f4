"""Hyperparameters and scheduler state as JSON, and back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor


def to_json(value: Any, what: str, remedy: str) -> Any:
    """Convert ``value`` to JSON types. A mapping with keys other than text becomes a list of pairs.

    Args:
        value: numbers, text, tensors and NumPy arrays in nested lists, tuples and mappings.
        what: the owner of the value, the subject of the error message.
        remedy: what the user can do about an error.

    Raises:
        ValueError: the value holds something that JSON cannot represent.
    """
    if hasattr(value, "tolist"):  # tensors, NumPy arrays and NumPy scalars
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        items = [(to_json(k, what, remedy), to_json(v, what, remedy)) for k, v in value.items()]
        return dict(items) if all(isinstance(k, str) for k in value) else [list(i) for i in items]
    if isinstance(value, (list, tuple)):
        return [to_json(v, what, remedy) for v in value]
    raise ValueError(f"{what} holds a {type(value).__name__}, which JSON cannot represent; {remedy}")


def from_json(value: Any, template: Any) -> Any:
    """Convert ``value`` from JSON, taking the types of containers and tensors from ``template``, a similar value."""
    if isinstance(template, Tensor):
        return torch.tensor(value, dtype=template.dtype, device=template.device)
    if isinstance(template, Mapping):
        pairs = value.items() if isinstance(value, dict) else value
        result = copy.copy(cast("dict[Any, Any]", template))
        result.clear()
        result.update({k: from_json(v, template.get(k)) for k, v in pairs})
        return result
    if isinstance(value, list):
        inner: Iterable[Any] = [None] * len(value)
        if isinstance(template, (list, tuple)) and len(template) == len(value):
            inner = template
        items = [from_json(v, t) for t, v in zip(inner, value, strict=True)]
        return tuple(items) if isinstance(template, tuple) else items
    return copy.copy(value)
