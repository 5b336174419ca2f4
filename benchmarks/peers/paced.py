"""A job whose steps take as long as they are told to."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from jobs.digits import Digits


@dataclass(frozen=True, kw_only=True)
class Paced(Digits):
    step_ms: float = 100.0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            time.sleep(self.step_ms / 1e3)
        return super().loss(output, target)
