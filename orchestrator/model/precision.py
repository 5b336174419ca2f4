"""The precision of forward passes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """What forward passes are computed in: ``dtype`` by autocast on ``device_type``; float32 if it is None."""

    device_type: str = "cpu"
    dtype: torch.dtype | None = None

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which a forward pass and its loss run."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.dtype is not None)


FLOAT32 = Precision()
