"""Models that use other parameters for other samples, so that each rank may lack gradients that others have."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.jobs.toys import Toy


class Part(nn.Module):
    """A part that some samples use: an expert, a tower or a block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).tanh())


class Parts(nn.Module):
    """Four parts: for samples of two kinds, for rare ones, which most batches lack, and for no sample at all.

    ``discards``: whether parts that no sample needs are called nevertheless.
    """

    def __init__(self, discards: bool) -> None:
        super().__init__()
        self.discards = discards
        self.norm = nn.LayerNorm(10)
        self.parts = nn.ModuleList(Part() for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        kind, rare = x[:, 0] > 0, x[:, 1] > 1.3
        changed = self.norm(x) * 0.5
        for used, part in zip((kind, ~kind, rare, rare & ~rare), self.parts, strict=True):
            rows = used.nonzero().flatten()
            if len(rows):
                out = part(x[rows]).float()
                changed = changed.index_add(0, rows, out * self.scale if used is rare else out)
            elif self.discards:
                part(x)
        return torch.cat([x[:, :2], (x + changed)[:, 2:]], dim=1)


class Heads(nn.Module):
    """A head for each of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(10, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out, kind = x.new_zeros(len(x), 4), (x[:, 0] > 0).long()
        for i, head in enumerate(self.heads):
            rows = (kind == i).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, head(x[rows]).float())
        return out


def uneven(discards: bool = False) -> nn.Module:
    layers = [Parts(discards) for _ in range(4)]
    layers[1].parts[0].requires_grad_(False)
    return nn.Sequential(*layers, Heads())


@dataclass(frozen=True, kw_only=True)
class Uneven(Toy):
    """Four layers of :class:`Parts`, of which one has a frozen part, and :class:`Heads`.

    Weights decay, and SGD has momentum: both would change a parameter without a gradient if that were zero.
    """

    adamw: bool = False
    build: Callable[[], nn.Module] = uneven

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.adamw:
            return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.3)
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.05)


class Repeated(nn.Module):
    """Two blocks that each sample passes up to three times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Part() for _ in range(2)), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        times = (x[:, 0] > 0).int() + (x[:, 1] > 0.7).int()
        for i in range(3):
            rows = (times >= i).nonzero().flatten()
            for block in self.blocks if len(rows) else ():
                x = x.index_add(0, rows, block(x[rows]).float())
        return self.head(x)


class OfOneRank(nn.Module):
    """Rank 1 alone calls the second block, for nothing. What it calls does not depend on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Part() for _ in range(3)), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i != 1:
                x = x + block(x)
            elif dist.is_initialized() and dist.get_rank() == 1:
                block(x)
        return self.head(x)
