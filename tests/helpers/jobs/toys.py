"""Small jobs with one quirk each."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import Dataset

from orchestrator.job import Job, Split


class Rows(Dataset[Any]):
    def __init__(self, items: list[Any]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))


@dataclass(frozen=True, kw_only=True)
class Toy(Job):
    """Ten numbers in, four classes out. A field or a subclass changes one thing.

    ``optimizer_of``: makes the optimizer in place of SGD.
    """

    samples: int = 200
    lr: float = 0.1
    momentum: float = 0.9
    build: Callable[[], nn.Module] = _two_layers
    loss_of: Callable[[Any, Any], Tensor] = F.cross_entropy
    optimizer_of: Callable[[Any], torch.optim.Optimizer] | None = None

    def model(self) -> nn.Module:
        return self.build()

    def dataset(self, split: Split) -> Dataset[Any]:
        random = torch.Generator().manual_seed(17 if split == "train" else 18)
        inputs = torch.randn(self.samples, 10, generator=random)
        targets = inputs[:, :4].argmax(dim=-1)
        return Rows([self.item(i, x, int(y)) for i, (x, y) in enumerate(zip(inputs, targets, strict=True))])

    def item(self, index: int, inputs: Tensor, target: int) -> tuple[Any, Any]:
        return inputs, target

    def loss(self, output: Any, target: Any) -> Tensor:
        return self.loss_of(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer_of is not None:
            return self.optimizer_of(parameters)
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)


def _embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 20))


@dataclass(frozen=True, kw_only=True)
class Tokens(Toy):
    """Sequences of 12 tokens, of which each sample has its own number of valid ones.

    ``empty``: samples in every ten that have none at all.
    """

    empty: int = 0
    build: Callable[[], nn.Module] = _embedded

    def item(self, index: int, inputs: Tensor, target: int) -> tuple[Tensor, Tensor]:
        tokens = (inputs.repeat(2)[:13] * 3).long().abs() % 20
        valid = 0 if index % 10 < self.empty else 1 + (7 * index) % 12
        return tokens[:-1], torch.where(torch.arange(12) < valid, tokens[1:], -100)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        valid = target != -100
        losses = F.cross_entropy(output.flatten(0, 1), target.clamp(min=0).flatten(), reduction="none")
        return (losses * valid.flatten()).sum() / valid.sum()  # without a valid token, its gradient is NaN

    def weight(self, target: Tensor) -> Tensor:
        return (target != -100).sum()

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(dim=-1) == target).sum()}

    def train_metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        return self.metrics(output, target)


class Normed(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


class Dropped(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))


@dataclass(frozen=True, kw_only=True)
class Steep(Toy):
    """Its only gradient is 5e4, on every rank."""

    lr: float = 1e-9

    def model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def item(self, index: int, inputs: Tensor, target: int) -> tuple[Tensor, float]:
        return torch.ones(1), 0.0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return 5e4 * output.mean()


class Wide(Toy):
    """Matrices large enough for PowerSGD to compress."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


@dataclass(frozen=True, kw_only=True)
class Constant(Toy):
    """Gradients depend on the samples alone, so that what every step applies can be added up."""

    lr: float = 0.5
    momentum: float = 0.0

    def model(self) -> nn.Module:
        return nn.Linear(32, 32, bias=False)

    def item(self, index: int, inputs: Tensor, target: int) -> tuple[Tensor, Tensor]:
        return inputs.repeat(4)[:32].roll(target), inputs.square().repeat(4)[:32]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output * target).sum(dim=-1).mean()


@dataclass(frozen=True, kw_only=True)
class Poisoned(Normed):
    """The samples numbered ``bad`` are NaN."""

    bad: tuple[int, ...] = ()

    def item(self, index: int, inputs: Tensor, target: int) -> tuple[Tensor, int]:
        return inputs * float("nan") if index in self.bad else inputs, target

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        return StepLR(optimizer, step_size=1, gamma=0.9)


class Branched(nn.Module):
    """No Sequential: a value skips layers, one weight is used at both ends, another hangs in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.deep = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10, bias=False))
        self.last = nn.Linear(10, 16, bias=False)
        self.last.weight = self.first.weight
        self.head = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, inputs: Tensor) -> Tensor:
        mask = inputs[:, :1] > 0
        skipped = self.first(inputs)
        hidden = skipped
        for block in self.blocks:
            hidden = block(hidden).relu()
        hidden = self.last(self.deep(hidden)) * self.scale
        return self.head(hidden + skipped * mask)


@dataclass(frozen=True, kw_only=True)
class Cliff(Toy):
    """At the step ``at`` the gradient is NaN, and the loss is not."""

    at: int
    calls: list[int] = field(default_factory=lambda: [0])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = super().loss(output, target)
        self.calls[0] += torch.is_grad_enabled()
        return loss + (0 * output).sum().sqrt() if self.calls[0] == self.at else loss


class _Heads(nn.Module):
    def __init__(self, uses: Callable[[int, int], bool], body: nn.Module, head: Callable[[], nn.Module]):
        super().__init__()
        self.body, self.head, self.spare = body, head(), head()
        self.uses = uses
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.body(inputs)
        out: Tensor = self.head(hidden)
        rank = dist.get_rank() if dist.is_initialized() else 0
        return out + self.spare(hidden) if self.uses(rank, self.calls) else out


@dataclass(frozen=True, kw_only=True)
class ConstantHeads(Constant):
    """``uses(rank, call)`` says whether the head named ``spare`` takes part in a forward pass."""

    uses: Callable[[int, int], bool]

    def model(self) -> nn.Module:
        return _Heads(self.uses, nn.Identity(), lambda: nn.Linear(32, 32, bias=False))


@dataclass(frozen=True, kw_only=True)
class TwoHeads(Toy):
    """``uses``: as of :class:`ConstantHeads`."""

    uses: Callable[[int, int], bool]

    def model(self) -> nn.Module:
        return _Heads(self.uses, nn.Sequential(nn.Linear(10, 16), nn.ReLU()), lambda: nn.Linear(16, 4))
