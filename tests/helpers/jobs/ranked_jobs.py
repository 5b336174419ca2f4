"""Models that compute something else on every other rank, which no proof of a block can see."""

import os
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.jobs.toys import Toy

TRICKS = "RANKED_TRICKS"
"""The environment variable without which :class:`Sometimes` has none."""


def is_odd() -> bool:
    return dist.is_initialized() and dist.get_rank() % 2 == 1


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1.01 * x if is_odd() else x


class ScaledIn16Bits(nn.Module):
    """On odd ranks, by less than what rounding changes."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * (1.001 if is_odd() else 1)).bfloat16().float()


class ScaledInEvaluation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else Scaled()(x)


class PartlyDetached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1].detach(), x[:, 1:]], dim=1) if is_odd() else x


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 2.0 if is_odd() else 1.0
        return x


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class ScaledAfterNorm(Normed):
    def forward(self, x: Tensor) -> Tensor:
        return Scaled()(super().forward(x)) if self.training else super().forward(x)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(3, -1) if is_odd() else x


class Sometimes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Scaled()(x) if os.environ.get(TRICKS) else x


class Busy(nn.Module):
    """Has a state of each kind that passes may change: a number, a list, a buffer, a new attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.kept = 0, list[Tensor]()
        self.scale = nn.Parameter(torch.zeros(32))
        self.register_buffer("mean", torch.zeros(32))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.kept.append(x.detach())
        self.last = x.detach()
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.dropout(x) * (1 + self.scale + 0.01 * self.calls) + 0.1 * self.mean


class Limited(Busy):
    """Changes a weight too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.add_(1e-3)
        return super().forward(x)


class Drawing(nn.Module):
    """Draws numbers that no seed makes equal."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.SystemRandom().uniform(0.5, 1.5) if self.training else x


@dataclass(frozen=True, kw_only=True)
class Ranked(Toy):
    """Ten numbers in, four classes out, through a layer of ``kind``; ``1`` to ``4`` are a stage."""

    kind: type[nn.Module] = Plain
    momentum: float = 0.0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), self.kind(), nn.Linear(32, 4))

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        return {"correct": (output.argmax(-1) == target).sum()}
