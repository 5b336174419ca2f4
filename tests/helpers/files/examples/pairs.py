"""A training step over pairs of images and texts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import orchestrator
from helpers.jobs.toys import Rows, Toy
from orchestrator.job import Split

__all__ = ["cross_entropy", "orchestrator"]


class Encoder(nn.Linear):
    def __init__(self) -> None:
        super().__init__(10, 4)
        self.temperature = nn.Parameter(torch.zeros(()))


@dataclass(frozen=True, kw_only=True)
class Example(Toy):
    def model(self) -> nn.Module:
        return Encoder()

    def dataset(self, split: Split) -> Rows | None:
        if split == "val":
            return None
        images, texts = torch.randn(2, 64, 10, generator=torch.Generator().manual_seed(0))
        return Rows(list(zip(images, texts, strict=True)))

    # the example
