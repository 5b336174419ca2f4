"""The jobs that ship, made quick for tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import Dataset

from helpers.jobs.toys import Rows
from jobs.digits import Digits, Images
from jobs.gpt import GPT, Windows
from orchestrator import current_step
from orchestrator.job import Split


def digits(**fields: Any) -> Digits:
    return QuickDigits(**{"hidden": 24, **fields})


@cache
def _digits(split: Split) -> Images:
    dataset = Digits().dataset(split)
    assert isinstance(dataset, Images)
    return dataset


@dataclass(frozen=True, kw_only=True)
class QuickDigits(Digits):
    """Digits that each process reads once; ``val_size`` limits the validation set."""

    val_size: int | None = None

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, int]]:
        images = _digits(split)
        if split == "train" or self.val_size is None:
            return images
        return Rows(list(itertools.islice(images.items, self.val_size)))


class MeasuredDigits(QuickDigits):
    """Measures its training batches, once for each loss and without gradients."""

    def train_metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        assert not output.requires_grad
        assert not torch.is_grad_enabled()
        large = target > 4
        return {**self.metrics(output, target), "large/share": large.sum(), "large/logit": output[large].sum()}


class Confusion:
    """The F1 scores of digits, from counts, and the mean of their probabilities."""

    def __init__(self) -> None:
        self.counts = torch.zeros(10, 10, dtype=torch.int64)
        self.probabilities: list[Tensor] = []

    def update(self, output: Tensor, target: Tensor) -> None:
        pairs = target * 10 + output.argmax(dim=-1)
        self.counts += pairs.bincount(minlength=100).view(10, 10).cpu()
        self.probabilities.append(output.softmax(dim=-1).amax(dim=-1))

    def merge(self, other: Confusion) -> None:
        self.counts += other.counts
        self.probabilities += other.probabilities

    def compute(self) -> dict[str, Tensor]:
        right, of_each = self.counts.diagonal(), self.counts.sum(0) + self.counts.sum(1)
        certain = torch.cat(self.probabilities).double().mean()
        return {"f1": (2 * right / of_each.clamp(min=1)).mean(), "counted": self.counts.sum(), "certain": certain}


class ScoredDigits(QuickDigits):
    """Has metrics that are no sums."""

    def metric_objects(self, split: Split) -> Mapping[str, Any]:
        return {"confusion": Confusion()}


class PredictedDigits(ScoredDigits):
    """Predicts the first samples itself."""

    def predictions(self, model: nn.Module, split: Split, part: int, parts: int) -> Iterable[tuple[Any, Any]]:
        assert not model.training
        assert not torch.is_grad_enabled()
        items: Any = self.dataset(split)
        device = next(model.parameters()).device
        for i in range(part, 9, parts):
            images, target = items[i]
            yield model(images[None].to(device)), torch.tensor([target], device=device)


class SteppedDigits(QuickDigits):
    """The loss becomes smaller with every step, and a metric is the step."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output, target) / (1 + 0.1 * current_step())

    def train_metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        return self.metrics(output, target)

    def metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        return {"step": torch.tensor(float(current_step() * len(target)))}


@dataclass(frozen=True, kw_only=True)
class AdamDigits(QuickDigits):
    lr: float = 2e-3

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.lr)


class ScheduledDigits(QuickDigits):
    """The learning rate is halved every three steps."""

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        return StepLR(optimizer, step_size=3, gamma=0.5)


@cache
def _windows(split: Split, context: int) -> Windows:
    dataset = GPT(context=context).dataset(split)
    assert isinstance(dataset, Windows)
    return dataset


@dataclass(frozen=True, kw_only=True)
class TinyGPT(GPT):
    layers: int = 1
    width: int = 16
    heads: int = 2
    context: int = 16
    warmup_steps: int = 5

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, Tensor]]:
        return _windows(split, self.context)


class FewToEvaluate(TinyGPT):
    def dataset(self, split: Split) -> Any:
        windows: Any = super().dataset(split)
        return windows if split == "train" else Rows([windows[i] for i in range(13)])
