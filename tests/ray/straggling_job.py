"""A job whose rank 1 sleeps in every step."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from jobs.digits import Digits


@dataclass(frozen=True, kw_only=True)
class Straggling(Digits):
    hidden: int = 16
    sleep_s: float = 0.03

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            time.sleep(self.sleep_s)
        return super().loss(output, target)
