"""Builds a model without allocating memory for its tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from orchestrator.user_code.errors import JobError


def on_meta_device(make: Callable[[], nn.Module]) -> nn.Module | None:
    """Return ``make()`` with its tensors on the meta device; None if the constructor fails there.

    It fails if it needs the values of tensors. A worker, which builds the model with memory, reports any other failure.

    Raises:
        JobError: ``make()`` does not return a model.
    """
    try:
        with torch.device("meta"):
            return make()
    except JobError:
        raise
    except Exception:
        return None
