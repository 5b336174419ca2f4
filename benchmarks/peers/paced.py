"""A job whose steps take a given time."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from jobs.digits import Digits


@dataclass(frozen=True, kw_only=True)
class Paced(Digits):
    """The digits job with a sleep of ``step_ms`` in every training step."""

    step_ms: float = 100.0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            time.sleep(self.step_ms / 1e3)
        return super().loss(output, target)
