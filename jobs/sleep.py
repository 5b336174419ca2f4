"""A model whose layers sleep instead of computing, to show pipeline schedules on any laptop.

Sleeping workers do not compete for CPU cores, so the timeline of this run shows 1F1B as in a textbook::

    python -m orchestrator.launch job=sleep strategy=pipeline strategy.num_workers=4 strategy.schedule=1F1B

Run it with other values of ``strategy.schedule`` to compare their measured and theoretical bubbles.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from orchestrator.job import Job, Split


@dataclass(frozen=True, kw_only=True)
class Sleep(Job):
    """A model of ``layers`` layers that fits random numbers.

    The forward pass of a layer takes ``forward_ms`` for a micro-batch of any size, its backward pass twice as long.
    """

    layers: int = 8
    forward_ms: float = 5.0
    samples: int = 256
    lr: float = 0.01

    def model(self) -> nn.Module:
        layers = {f"layer{number}": Sleeper(self.forward_ms / 1e3) for number in range(self.layers)}
        return nn.Sequential(OrderedDict(layers))

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, ...]]:
        inputs = torch.randn(self.samples, 2, generator=torch.Generator().manual_seed(int(split == "val")))
        return TensorDataset(inputs, 2 * inputs)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr)

    def check(self) -> None:
        for name in ("layers", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"job.{name}={getattr(self, name)}: must be at least 1")
        for name in ("forward_ms", "lr"):
            if getattr(self, name) <= 0:
                raise ValueError(f"job.{name}={getattr(self, name):g}: must be greater than 0")


class Sleeper(nn.Module):
    """Scales and shifts its input, and sleeps.

    It sleeps once in the forward pass, once for the gradient of its input and once for the gradient of its weights.
    """

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.seconds)
        # The shift lets the first layer's backward pass take as long as the others', though its input has no gradient.
        return _nap(inputs + self.shift, self.seconds) * _nap(self.scale, self.seconds)


class _Nap(torch.autograd.Function):
    """The identity, which sleeps in the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


_nap: Callable[[Tensor, float], Tensor] = _Nap.apply
