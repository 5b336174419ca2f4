"""Jobs whose loss or state depends on which samples are in one batch, and some that only look like it."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.jobs.toys import Toy
from orchestrator.job import Job

CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])


def mlp(middle: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 16), middle or nn.Tanh(), nn.Linear(16, 4))


class OwnBatchNorm(nn.Module):
    """Normalizes with the mean of a batch, and keeps a moving average of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0) if self.training else self.mean
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * mean.detach()
        return torch.tanh(x - mean)


class Codebook(nn.Module):
    """Replaces each sample by the nearest code; the codes are moving averages of what they have replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(8, 16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        quantised = self.codes[nearest]
        if self.training:
            self.codes.data = self.codes.data.index_add(0, nearest, 0.1 * (x.detach() - quantised))
        return x + (quantised - x).detach()


class Observer(nn.Module):
    """Rounds to a grid between the smallest and the largest value seen, as fake quantisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("highest", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.highest.copy_(torch.maximum(self.highest, x.detach().abs().max()))
        step = self.highest / 15
        return x + ((x / step).round() * step - x).detach()


class HookedOutput(nn.Module):
    """A hook on its output limits the gradient by its largest entry."""

    def forward(self, x: Tensor) -> Tensor:
        out = x.tanh()
        if out.requires_grad:
            out.register_hook(lambda gradient: 0.1 * gradient / gradient.abs().amax())
        return out


class GradientNorm(nn.Module):
    """Gives the gradient of all samples together a length of one."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh()
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / gradient.norm())
        return x


class StepCounter(nn.Module):
    """Scales by a number that grows with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x * (1 + 0.1 * self.calls)


class RandomDepth(nn.Module):
    """Draws random numbers in every way, so that a batch has others than its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        keep = x.new_empty(len(x), 1).bernoulli_(0.8) / 0.8
        x = x + self.inner(F.dropout(x, 0.3)) * keep + 0.1 * torch.randn_like(x)
        return x + self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0] * torch.rand(len(x), 1)


class PythonsRandom(nn.Module):
    """Takes random numbers that torch knows nothing of."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([[random.random()] for _ in x])


class Counts(nn.Module):
    """Counts its calls in a plain attribute, which a comparison must not add to."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x.tanh()


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))


summed = partial(F.cross_entropy, reduction="sum")
class_weighted = partial(F.cross_entropy, weight=CLASS_WEIGHTS)
ignoring = partial(F.cross_entropy, ignore_index=0)


def limited(output: Tensor, target: Tensor, most: float = 5.0) -> Tensor:
    return nn.functional.cross_entropy(output, target).clamp(max=most)


def each_limited(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, reduction="none").clamp(max=5.0).mean()


def noisy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target) * (1 + random.random())


def of_probabilities(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy(output.softmax(1), nn.functional.one_hot(target, 4).float())


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Each sample is to be nearest to itself among all of the batch."""
    unit = F.normalize(output, dim=1)
    return F.cross_entropy(unit @ unit.T, torch.arange(len(unit)))


@dataclass(frozen=True, kw_only=True)
class OfBatches(Toy):
    """``middle``: builds the second of three layers. ``weigh``: the weight of a batch; None for its samples."""

    middle: Callable[[], nn.Module] = nn.Tanh
    weigh: Callable[[Tensor], Tensor] | None = None

    def model(self) -> nn.Module:
        return mlp(self.middle())

    def weight(self, target: Any) -> Tensor | None:
        return None if self.weigh is None else self.weigh(target)


LOSS, GRADIENT = "the mean over their halves", "the gradient of 0.weight, 0.bias is not"
FAR_APART = "has a small loss and the other a large one"
DEPEND: dict[str, tuple[Job, tuple[str, ...], tuple[str, ...]]] = {
    "own batch norm": (OfBatches(middle=OwnBatchNorm), (LOSS, "1.mean"), (LOSS, "1.mean")),
    "codebook": (OfBatches(middle=Codebook), ("1.codes",), (LOSS, "1.codes")),
    "observer": (OfBatches(middle=Observer), (LOSS, "1.highest"), (LOSS, "1.highest")),
    "sum": (OfBatches(loss_of=summed), (LOSS, "return a mean"), (LOSS, "return a mean")),
    "class weights": (OfBatches(loss_of=class_weighted), (LOSS, "Job.weight"), (LOSS, "Job.weight")),
    "ignored labels": (OfBatches(loss_of=ignoring), (LOSS, "Job.weight"), (LOSS, "Job.weight")),
    "limited mean": (OfBatches(loss_of=limited), (FAR_APART, "not their mean"), (FAR_APART, "not their mean")),
    "limit that is reached at first": (
        OfBatches(loss_of=partial(limited, most=2.303)),
        (FAR_APART, "not their mean"),
        (FAR_APART, "not their mean"),
    ),
    "contrastive": (OfBatches(loss_of=contrastive), (LOSS, "gather_batch"), (LOSS, "gather_batch")),
    "gradient norm": (OfBatches(middle=GradientNorm), (GRADIENT, "scale_grad_by_freq"), (GRADIENT,)),
    "hook on an output": (OfBatches(middle=HookedOutput), (GRADIENT, "a hook"), (GRADIENT, "a hook")),
    "spectral norm": (OfBatches(middle=spectral), (), ("0._u", "once for each part")),
    "step counter": (OfBatches(middle=StepCounter), (), (LOSS, "1.calls", "once for each part")),
}
"""A job; words of the warning about replicas, and of that about parts that one replica sees in turn. No words: no
difference."""

EQUAL: dict[str, Job] = {
    "plain": OfBatches(),
    "losses that are limited": OfBatches(loss_of=each_limited),
    "a loss that draws": OfBatches(loss_of=noisy),
    "probabilities": OfBatches(loss_of=of_probabilities),
    "dropout": OfBatches(middle=nn.Dropout),
    "random numbers": OfBatches(middle=RandomDepth),
    "Python's random numbers": OfBatches(middle=PythonsRandom),
    "BatchNorm": OfBatches(middle=lambda: nn.BatchNorm1d(16)),
    "LayerNorm": OfBatches(middle=lambda: nn.LayerNorm(16)),
    "counts calls": OfBatches(middle=Counts),
    "class weights that are given": OfBatches(loss_of=class_weighted, weigh=lambda target: CLASS_WEIGHTS[target].sum()),
    "ignored labels that are given": OfBatches(loss_of=ignoring, weigh=lambda target: (target != 0).sum()),
}
"""Jobs that give no reason for a warning, or have a note of their own."""


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(10, 16), nn.Linear(16, 4)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.head(self.bag(*batch))


def bags(items: list[tuple[Tensor, int]]) -> Any:
    lengths = torch.tensor([0, *(len(tokens) for tokens, _ in items)])
    targets = torch.tensor([target for _, target in items])
    return (torch.cat([tokens for tokens, _ in items]), lengths.cumsum(0)[:-1]), targets


@dataclass(frozen=True, kw_only=True)
class Ragged(Toy):
    """Batches of tokens without padding, as ``nn.EmbeddingBag`` takes them."""

    build: Callable[[], nn.Module] = Bags
    collate = property(lambda self: bags)

    def item(self, index: int, inputs: Tensor, target: int) -> Any:
        return torch.arange(2 + index % 7), target
