"""A job whose passes take a time in proportion to their samples, and no processor."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from orchestrator.job import Job, Split


@dataclass(frozen=True, kw_only=True)
class Proportional(Job):
    """Two linear layers, of which the first sleeps ``sample_ms`` for each sample."""

    sample_ms: float = 4.0

    def model(self) -> nn.Module:
        return nn.Sequential(Sleeper(self.sample_ms / 1e3), nn.Linear(2, 2))

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, ...]]:
        inputs = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, 2 * inputs)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)


class Sleeper(nn.Module):
    """A linear layer that sleeps in its forward pass."""

    def __init__(self, sample_s: float):
        super().__init__()
        self.sample_s = sample_s
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.sample_s * len(inputs))
        out: Tensor = self.linear(inputs)
        return out
