"""Jobs with sparse gradients, where a batch touches few of the parameters, on generated data with a known solution.

Lock-free updates (``strategy=hogwild``) and parameter servers (``strategy=parameter_server``) are made for such jobs.

    python -m orchestrator.launch job=sparse
    python -m orchestrator.launch job=matrix_completion train.global_batch_size=1024 train.steps=2000
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from orchestrator.job import Job, Split

Algorithm = Literal["sgd", "adagrad", "adam"]
EPSILON = 1e-5
"""The epsilon of Adagrad and Adam. Gradients of rare words often cancel out to rounding errors. With the usual, smaller
epsilon these would become full steps, and the losses of two layouts would diverge."""

SPIN_S = 200e-6
"""How long :func:`wait` spins at the end."""


@dataclass(frozen=True, kw_only=True)
class SparseJob(Job):
    """The base class of both jobs.

    Attributes:
        sparse: False makes the same gradients dense tensors.
        delay_us: microseconds to add to each computation of a gradient, to simulate a more expensive model.
    """

    algorithm: Algorithm
    lr: float
    sparse: bool
    delay_us: float

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.algorithm == "sgd":
            return torch.optim.SGD(parameters, lr=self.lr)
        kind = torch.optim.Adagrad if self.algorithm == "adagrad" else torch.optim.Adam
        return kind(parameters, lr=self.lr, eps=EPSILON)

    @property
    def collate(self) -> Callable[[Any], Any]:
        return join

    def delay(self) -> None:
        """Wait for ``delay_us`` if gradients are computed. Subclasses call this in the loss."""
        if self.delay_us and torch.is_grad_enabled():
            wait(self.delay_us / 1e6)

    def check(self) -> None:
        if self.algorithm == "adam" and self.sparse:
            raise ValueError(
                "job.algorithm=adam: torch's Adam takes no sparse gradients; "
                "choose job.algorithm=adagrad or sgd, or set job.sparse=false"
            )
        if self.lr <= 0:
            raise ValueError(f"job.lr={self.lr:g}: must be greater than 0")
        if self.delay_us < 0:
            raise ValueError(f"job.delay_us={self.delay_us:g}: must be at least 0")


@dataclass(frozen=True, kw_only=True)
class SparseLogistic(SparseJob):
    """Logistic regression on texts of ``words`` words, each drawn from ``features`` words by Zipf's law.

    A text is a bag of words; 90 draws give 72 different words on average. Labels are drawn with the probabilities of
    the model :meth:`truth`, whose accuracy is 88 %.
    """

    features: int = 50_000
    words: int = 90
    samples: int = 20_000
    algorithm: Algorithm = "adagrad"
    lr: float = 0.05
    sparse: bool = True
    delay_us: float = 0.0

    def model(self) -> nn.Module:
        return BagOfWords(self.features, sparse=self.sparse)

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(1 if split == "train" else 2)
        chances = 1 / torch.arange(1, self.features + 1, dtype=torch.float64)
        upper_bounds = (chances / chances.sum()).cumsum(0)
        drawn = torch.rand(_rows(split, self.samples), self.words, dtype=torch.float64, generator=random)
        texts = torch.searchsorted(upper_bounds, drawn).clamp_(max=self.features - 1)
        with torch.no_grad():
            labels = torch.rand(len(texts), generator=random) < self.truth()(texts).sigmoid()
        return Columns(texts, labels.float())

    def truth(self) -> nn.Module:
        """Return the model that the labels are drawn from. Half of them are positive."""
        model = BagOfWords(self.features, sparse=False)
        chances = 1 / torch.arange(1, self.features + 1)
        with torch.no_grad():
            model.weight.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
            expected = self.words * (chances / chances.sum()) @ model.weight.weight
            model.bias.copy_(-expected)
        return model

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.delay()
        return F.binary_cross_entropy_with_logits(output, target)

    def metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        return {"accuracy": ((output > 0) == (target > 0)).sum()}

    def check(self) -> None:
        super().check()
        for name in ("features", "words", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"job.{name}={getattr(self, name)}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class MatrixCompletion(SparseJob):
    """Completion of a ``size`` x ``size`` matrix of low rank from ``observed`` entries, with mean squared error.

    The entries have variance 1 and noise of standard deviation ``noise``, whose square is the lowest possible loss.
    """

    size: int = 2_000
    rank: int = 10
    observed: int = 200_000
    noise: float = 0.1
    algorithm: Algorithm = "adagrad"
    lr: float = 0.3
    sparse: bool = True
    delay_us: float = 0.0

    def model(self) -> nn.Module:
        return LowRank(self.size, self.rank, sparse=self.sparse)

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(0)
        held_out = _rows("val", self.observed)
        # Distinct entries, so that the held-out ones are never trained on.
        chosen = torch.randperm(self.size**2, generator=random)[: self.observed + held_out]
        rows, columns = torch.randn(2, self.size, self.rank, generator=random)
        noise = self.noise * torch.randn(len(chosen), generator=random)
        chosen, noise = (part[-held_out:] if split == "val" else part[:-held_out] for part in (chosen, noise))
        row, column = chosen // self.size, chosen % self.size
        values = (rows[row] * columns[column]).sum(dim=-1) / self.rank**0.5 + noise
        return Columns(torch.stack([row, column], dim=-1), values)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.delay()
        return F.mse_loss(output, target)

    def check(self) -> None:
        super().check()
        for name in ("size", "rank", "observed"):
            if getattr(self, name) < 1:
                raise ValueError(f"job.{name}={getattr(self, name)}: must be at least 1")
        if self.noise < 0:
            raise ValueError(f"job.noise={self.noise:g}: must be at least 0")
        most = self.size**2 * 10 // 11
        if self.observed > most:
            raise ValueError(
                f"job.observed={self.observed}: must be at most {most}, because another tenth is held out and the "
                f"matrix has {self.size**2} entries; lower it or raise job.size"
            )


class BagOfWords(nn.Module):
    """Sums the weights of a text's words: int64 of shape (batch, words) -> logits of shape (batch,)."""

    def __init__(self, features: int, *, sparse: bool):
        super().__init__()
        self.weight = nn.EmbeddingBag(features, 1, mode="sum", sparse=sparse)
        nn.init.zeros_(self.weight.weight)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, texts: Tensor) -> Tensor:
        logits: Tensor = self.weight(texts).squeeze(-1) + self.bias
        return logits


class LowRank(nn.Module):
    """Predicts matrix entries: (row, column) as int64 of shape (batch, 2) -> values of shape (batch,)."""

    def __init__(self, size: int, rank: int, *, sparse: bool):
        super().__init__()
        self.rows = nn.Embedding(size, rank, sparse=sparse)
        self.columns = nn.Embedding(size, rank, sparse=sparse)
        for table in (self.rows, self.columns):
            nn.init.normal_(table.weight, std=rank**-0.5)

    def forward(self, indices: Tensor) -> Tensor:
        entries: Tensor = (self.rows(indices[:, 0]) * self.columns(indices[:, 1])).sum(dim=-1)
        return entries


class Columns(Dataset[tuple[Tensor, Tensor]]):
    """Samples as rows of two tensors. A batch is indexed at once: single items would take longer than a step."""

    def __init__(self, inputs: Tensor, targets: Tensor):
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int | list[int]) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    __getitems__ = __getitem__


def join(samples: Any) -> Any:
    """Join samples to a batch; the result of ``Columns.__getitems__`` already is one."""
    return samples if isinstance(samples, tuple) else default_collate(samples)


def wait(seconds: float) -> None:
    """Wait precisely: sleep, then spin at the end, because the system wakes a sleeping thread about 60 us late."""
    end = time.perf_counter() + seconds
    if seconds > SPIN_S:
        time.sleep(seconds - SPIN_S)
    while time.perf_counter() < end:
        pass


def _rows(split: Split, samples: int) -> int:
    return samples if split == "train" else max(1, samples // 10)
