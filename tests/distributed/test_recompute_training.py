"""Activation checkpointing changes no loss, in any layout."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.cases import Case, having
from helpers.gang import Gang
from helpers.layouts import LAYOUTS
from helpers.quick_jobs import QuickDigits
from helpers.training import assert_same, losses, train


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.layer(self.norm(x)).tanh(), 0.1, self.training)


class Listed(nn.Module):
    """Its forward pass has to be recorded, and its blocks are in a list."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True, kw_only=True)
class BlockDigits(QuickDigits):
    """Blocks with dropout and running statistics, in an ``nn.Sequential`` or not."""

    listed: bool = False

    def model(self) -> nn.Module:
        listed = Listed(self.hidden)
        if self.listed:
            return listed
        layers = OrderedDict([("flatten", nn.Flatten()), ("first", listed.first)])
        layers |= {f"block{i}": block for i, block in enumerate(listed.blocks)}
        return nn.Sequential(layers | {"head": listed.head})


STARTS = {"1F1B-2": (1,), "ZBVZeroBubble-2": (0, 1, 2), "GPipe-2x2": (1,)}
"""The blocks that begin a stage."""


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "blocks") for name in ("single", "ddp-2", *STARTS)), ("ddp-2", "selective"), ("1F1B-2", "selective")],
)
def test_losses_and_models_are_equal(gang: Gang, name: str, mode: Any, listed: bool) -> None:
    layout = LAYOUTS[name]
    prefix = "blocks." if listed else "block"
    cut = {"split": tuple(f"{prefix}{i}" for i in STARTS[name])} if name in STARTS else {}
    case = layout.of(Case(job=BlockDigits(hidden=24, listed=listed), train=having(steps=6, grad_accumulation=2)), **cut)
    recomputed = replace(case, train=having(case.train, activation_checkpointing=mode))
    kept = gang.run(train, case, world_size=layout.world_size)
    again = gang.run(train, recomputed, world_size=layout.world_size)
    assert torch.equal(losses(again), losses(kept))
    for rank, other in zip(again, kept, strict=True):
        assert_same(rank.model, other.model)
