"""A model whose weights autocast casts, leaves alone, or both, whatever their shapes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.jobs.quick_jobs import QuickDigits

ROWS, WIDTH, EXPERTS = 8, 8, 4


class Mixed(nn.Module):
    """A block with a gate in float32, adapters, experts, and weights that are added, multiplied, or used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.router = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.scale = nn.Parameter(torch.rand(ROWS, WIDTH))
        self.twice = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.cast = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        with torch.autocast(x.device.type, enabled=False):
            gates = F.linear(h.float(), self.router).softmax(-1)
        mixed = torch.einsum("bti,eio->bteo", h, self.experts)
        h = self.scale * (mixed * gates[..., None]).sum(-2)
        h = self.layer(h) + self.up(self.down(h)) + F.linear(h, self.twice) * self.twice.square().mean()
        return x + F.linear(h.bfloat16(), self.cast.to(torch.bfloat16)).float()


class MixedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.shades = nn.Embedding(4, WIDTH)
        self.blocks = nn.ModuleList(Mixed() for _ in range(4))
        self.back = nn.Linear(WIDTH, 4, bias=False)
        self.back.weight = self.shades.weight
        self.head = nn.Linear(ROWS * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, ROWS, 8) + self.positions + self.shades((x.view(-1, ROWS, 8)[..., 0] * 3.99).long())
        for block in self.blocks:
            x = block(x)
        return self.head(self.back(x).flatten(1))


@dataclass(frozen=True, kw_only=True)
class MixedDigits(QuickDigits):
    lr: float = 0.1

    def model(self) -> nn.Module:
        return MixedModel()

    def optimizer(self, parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=self.lr)
