"""Builds a model without allocating memory for its tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def on_meta_device(make: Callable[[], nn.Module]) -> nn.Module | None:
    """Return ``make()`` with its tensors on the meta device; None if the constructor fails there.

    It fails if it needs the values of tensors. A worker, which builds the model with memory, reports any other failure.
    """
    try:
        with torch.device("meta"):
            return make()
    except Exception:
        return None
