"""Jobs that are hard to predict: one very unbalanced, one of many tiny layers, one that is mostly an embedding."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from orchestrator.job import Job, Split

SAMPLES = 2048
CLASSES = 16


class _Classifier(Job):
    """A classifier of random samples."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True, kw_only=True)
class Unbalanced(_Classifier):
    """A layer that takes nearly all the time, among small ones."""

    width: int = 2048

    def model(self) -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                small0=nn.Linear(64, 64),
                widen=nn.Linear(64, self.width),
                large=nn.Linear(self.width, self.width),
                narrow=nn.Linear(self.width, 64),
                small1=nn.Linear(64, 64),
                head=nn.Linear(64, CLASSES),
            )
        )

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, ...]]:
        return _random_samples((64,))


@dataclass(frozen=True, kw_only=True)
class TinyLayers(_Classifier):
    """Many layers that each take a few microseconds."""

    layers: int = 60
    width: int = 32

    def model(self) -> nn.Module:
        stack: OrderedDict[str, nn.Module] = OrderedDict()
        for i in range(self.layers):
            stack[f"linear{i}"] = nn.Linear(self.width, self.width)
            stack[f"norm{i}"] = nn.LayerNorm(self.width)
        stack["head"] = nn.Linear(self.width, CLASSES)
        return nn.Sequential(stack)

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, ...]]:
        return _random_samples((self.width,))


@dataclass(frozen=True, kw_only=True)
class MostlyEmbedding(_Classifier):
    """A table of many rows, of which a batch uses few, with dense gradients."""

    rows: int = 100_000
    width: int = 64
    length: int = 32

    def model(self) -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                table=nn.Embedding(self.rows, self.width),
                flatten=nn.Flatten(),
                hidden=nn.Linear(self.length * self.width, 128),
                relu=nn.ReLU(),
                head=nn.Linear(128, CLASSES),
            )
        )

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randint(self.rows, (SAMPLES, self.length), generator=generator)
        return TensorDataset(inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator))


def _random_samples(shape: tuple[int, ...]) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, *shape, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator))
