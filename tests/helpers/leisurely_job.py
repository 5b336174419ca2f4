"""A job whose training steps take a while, so that something can happen meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from jobs.digits import Digits


@dataclass(frozen=True, kw_only=True)
class Leisurely(Digits):
    hidden: int = 16
    pause_ms: float = 20.0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            time.sleep(self.pause_ms / 1e3)
        return super().loss(output, target)
