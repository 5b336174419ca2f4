"""Jobs that say what they see of a GPU, or take too much of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jobs.digits import Digits


@dataclass(frozen=True, kw_only=True)
class Observing(Digits):
    """Measures the devices that a worker sees, whether it computes on one, and the memory of its tensors."""

    def train_metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        values = {
            "visible_devices": torch.cuda.device_count(),
            "on_gpu": output.is_cuda,
            "allocated_mb": torch.cuda.memory_allocated() / 1e6,
        }
        return {name: torch.tensor(len(target) * float(value)) for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class Greedy(Digits):
    """Rank 1 asks for a petabyte."""

    def loss(self, output: Any, target: Any) -> Tensor:
        if dist.get_rank() == 1 and torch.is_grad_enabled():
            torch.empty(2**50, dtype=torch.uint8, device=output.device)
        return super().loss(output, target)
