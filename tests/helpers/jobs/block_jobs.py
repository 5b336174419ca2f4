"""A job whose model has repeated blocks."""

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from helpers.jobs.quick_jobs import QuickDigits


class Block(nn.Module):
    def __init__(self, width: int, dropout: float, normed: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if normed else nn.Identity()
        self.layer = nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.layer(self.norm(x)).tanh(), self.dropout, self.training)


class Listed(nn.Module):
    """Its forward pass has to be recorded, and its blocks are in a list."""

    def __init__(self, width: int, dropout: float, normed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width, dropout, normed) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True, kw_only=True)
class BlockDigits(QuickDigits):
    """Blocks with dropout and, if ``normed``, running statistics; ``listed`` or in an ``nn.Sequential``."""

    listed: bool = False
    dropout: float = 0.1
    normed: bool = True

    def model(self) -> nn.Module:
        listed = Listed(self.hidden, self.dropout, self.normed)
        if self.listed:
            return listed
        layers = OrderedDict([("flatten", nn.Flatten()), ("first", listed.first)])
        layers |= {f"block{i}": block for i, block in enumerate(listed.blocks)}
        return nn.Sequential(layers | {"head": listed.head})
