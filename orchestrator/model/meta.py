"""Builds a model without allocating memory for its tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def on_meta_device(make: Callable[[], nn.Module]) -> nn.Module:
    """Return ``make()`` with its tensors on the meta device, or on the CPU if the constructor needs their values."""
    try:
        with torch.device("meta"):
            return make()
    except (RuntimeError, NotImplementedError):
        return make()
