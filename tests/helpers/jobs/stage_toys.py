"""Small jobs whose models are chains of layers, each with something that is hard for stages."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import default_collate

from helpers.jobs.toys import Tokens, Toy


@dataclass(frozen=True, kw_only=True)
class ScheduledChain(Toy):
    """AdamW with weight decay by name, and rates by size, halved every half epoch: every three of 6.25 steps."""

    lr: float = 1e-2

    def parameter_groups(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        assert any(name.startswith("head.") for name, _ in named_parameters), "names of a part of the model"
        decay = {"head.": 0.5, "weight": 0.1, "bias": 0.0}
        group_of = {name: next(key for key in decay if key in name) for name, _ in named_parameters}
        return [
            {"params": [p for name, p in named_parameters if group_of[name] == key], "weight_decay": value}
            for key, value in decay.items()
        ]

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        sized = [{**group, "lr": self.lr / (1 + sum(p.numel() for p in group["params"]) / 100)} for group in parameters]
        return torch.optim.AdamW(sized, lr=self.lr)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int, steps_per_epoch: float = math.nan) -> LRScheduler:
        return StepLR(optimizer, step_size=round(steps_per_epoch / 2), gamma=0.5)


def chain(**layers: Any) -> nn.Sequential:
    """Layers by name. Two numbers are the sizes of an ``nn.Linear``."""
    return nn.Sequential(
        OrderedDict({name: nn.Linear(*made) if isinstance(made, tuple) else made for name, made in layers.items()})
    )


def plain() -> nn.Module:
    """Four layers with parameters."""
    return chain(
        first=(10, 24), act0=nn.Tanh(), second=(24, 24), act1=nn.Tanh(), third=(24, 24), act2=nn.Tanh(), head=(24, 4)
    )


# Parameters in several places ---------------------------------------------------------------------


def tied_ends() -> nn.Module:
    """The embedding's table is the output layer's too."""
    model = chain(embed=nn.Embedding(20, 12), first=(12, 12), act=nn.Tanh(), second=(12, 12), head=(12, 20))
    model.head.weight = model.embed.weight
    return model


def tied_thrice() -> nn.Module:
    model = chain(first=(10, 10), act0=nn.Tanh(), second=(10, 10), act1=nn.Tanh(), third=(10, 10), head=(10, 4))
    model.second.weight = model.third.weight = model.first.weight
    return model


def tied_and_frozen() -> nn.Module:
    model = tied_ends()
    model.embed.weight.requires_grad_(False)
    return model


def used_twice() -> nn.Module:
    """One object is the second and the third layer, another every activation."""
    layer, act = nn.Linear(24, 24), nn.Tanh()
    return chain(first=(10, 24), act0=act, second=layer, act1=act, fourth=layer, act2=act, head=(24, 4))


def norm_used_twice() -> nn.Module:
    norm = nn.BatchNorm1d(16)
    return chain(first=(10, 16), norm0=norm, second=(16, 16), norm1=norm, head=(16, 4))


class Table(nn.Module):
    """Adds a constant that it has as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, 24))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


def table_used_twice() -> nn.Module:
    table = Table()
    return chain(first=(10, 24), table0=table, second=(24, 24), third=(24, 24), table1=table, head=(24, 4))


def frozen_in_between() -> nn.Module:
    """Some parameters of every layer but the last, and all of one."""
    model = plain()
    model.first.bias.requires_grad_(False)
    model.second.bias.requires_grad_(False)
    model.third.weight.requires_grad_(False)
    return nn.Sequential(*model[:3], nn.Linear(24, 24).requires_grad_(False), *model[3:])


def frozen(*layers: str) -> nn.Module:
    """Of the layers of :func:`plain`, those named cannot be trained."""
    model = plain()
    for name in layers:
        model.get_submodule(name).requires_grad_(False)
    return model


def frozen_first() -> nn.Module:
    return frozen("first", "second")


class FreezesInTrain(nn.Sequential):
    """A chain whose ``train()`` keeps its norm in eval mode and freezes the layers before it, as detectors do."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.norm.eval()
        self.first.requires_grad_(False)
        return self


def freezes_in_train() -> nn.Module:
    norm = nn.BatchNorm1d(24)
    norm.running_mean = torch.linspace(-1, 1, 24)
    layers = dict(plain().named_children())
    return FreezesInTrain(OrderedDict(first=layers.pop("first"), norm=norm, **layers))


# What flows between layers ------------------------------------------------------------------------


class With(nn.Module):
    """A linear layer on the first of what it gets; ``give`` makes what it returns of that and of what it got."""

    def __init__(self, inputs: int, outputs: int, give: Callable[[Tensor, Any], Any]):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.give = give

    def forward(self, value: Any) -> Any:
        x = value
        while not isinstance(x, Tensor):
            x = next(iter(x.values())) if isinstance(x, dict) else x[0]
        return self.give(self.linear(x).tanh(), value)


def through(*gives: Callable[[Tensor, Any], Any]) -> nn.Module:
    sizes = [10, *[24] * len(gives)]
    layers = {f"layer{i}": With(sizes[i], sizes[i + 1], give) for i, give in enumerate(gives)}
    return chain(**layers, head=With(24, 4, lambda x, value: x))


def pairs() -> nn.Module:
    """A tensor with a gradient, one of integers, one without a gradient, and one that nobody uses."""
    return through(
        lambda x, got: (x, torch.arange(24), x.detach() * 2, x + 1),
        lambda x, got: (x + got[1] * 0.01 + got[2], *got[1:]),
        lambda x, got: (x * got[2].sigmoid() + got[1] * 0.01, *got[1:]),
    )


def skips() -> nn.Module:
    """What the first layer returns passes by the second to the third."""
    return through(lambda x, got: (x, x.sigmoid()), lambda x, got: (x, got[1]), lambda x, got: x + got[1])


def nested() -> nn.Module:
    return through(
        lambda x, got: {"x": x, "more": [x.sin(), (x.cos(), None)]},
        lambda x, got: {"x": x + got["more"][1][0], "more": [got["more"][0], None]},
        lambda x, got: [x * got["more"][0], {}],
    )


def same_twice() -> nn.Module:
    return through(lambda x, got: (x, x), lambda x, got: (x, got[1]), lambda x, got: x + got[1])


def views() -> nn.Module:
    """Layers end with views, one of which is not contiguous; gradients that are spread come back."""
    return chain(
        first=(10, 24),
        shape=nn.Unflatten(1, (4, 6)),
        turned=Turned(),
        second=(4, 4),
        flat=nn.Flatten(),
        third=(24, 24),
        mean=Mean(),
        head=(6, 4),
    )


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x.transpose(1, 2) * self.scale).transpose(1, 2).transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (4, 6)).sum(1)


class Beside(nn.Module):
    """Returns, beside what it makes of its input, something that its parameters alone make."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 24))
        self.shift = nn.Parameter(torch.linspace(-1, 1, 24))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.scale, self.scale.sin() * self.shift


def beside() -> nn.Module:
    return chain(first=(10, 24), beside=Beside(), second=With(24, 24, lambda x, got: x + got[1]), head=(24, 4))


def text_between() -> nn.Module:
    return through(lambda x, got: (x, "text"), lambda x, got: x, lambda x, got: x)


def answers() -> nn.Module:
    """Returns a dict, of which the loss takes one entry."""
    return through(lambda x, got: x, lambda x, got: x, lambda x, got: x).append(Answer())


class Answer(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"text": "no tensor", "logits": x, "size": (x.detach().norm(),)}


@dataclass(frozen=True, kw_only=True)
class Answers(Toy):
    """The model's output is a dict."""

    build: Callable[[], nn.Module] = answers

    def loss(self, output: dict[str, Any], target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], target)


class Opened(nn.Module):
    """Takes a dict or a tuple of two tensors, of which it makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 24)

    def forward(self, value: Any) -> Tensor:
        one, (other,) = (value["one"], value["other"]) if isinstance(value, dict) else value
        return self.linear(one + other)


def opened() -> nn.Module:
    return chain(first=Opened(), act=nn.Tanh(), second=(24, 24), third=(24, 24), head=(24, 4))


class Lengths(Tokens):
    """Batches are as long as their longest sample."""

    def collate(self, items: list[Any]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        longest = max(int((target != -100).sum()) for _, target in items)
        inputs, targets = default_collate(items)
        return inputs[:, :longest], targets[:, :longest]


@dataclass(frozen=True, kw_only=True)
class NestedBatches(Toy):
    """Inputs are dicts or tuples, targets dicts."""

    build: Callable[[], nn.Module] = opened
    as_dict: bool = True

    def item(self, index: int, inputs: Tensor, target: int) -> tuple[Any, Any]:
        one, other = inputs.clone(), (inputs * 0.1,)
        return {"one": one, "other": other} if self.as_dict else (one, other), {"class": [target]}

    def loss(self, output: Tensor, target: Any) -> Tensor:
        return F.cross_entropy(output, target["class"][0])

    def metrics(self, output: Tensor, target: Any) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(dim=-1) == target["class"][0]).sum()}


# Gradients that are not as usual ------------------------------------------------------------------


class BadGradient(nn.Module):
    """The gradient of its weight, and of nothing else, is NaN where a sample's mark is set. Returns what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mark = value
        fine = 1 - (mark > 0).any().float()
        return x + ((0 * self.weight).sum() + fine).sqrt() - fine, mark


def bad_gradient() -> nn.Module:
    """The last of the ten numbers is the mark, which no other layer sees."""
    return chain(
        first=With(9, 24, lambda x, got: (x, got[1])),
        second=With(24, 24, lambda x, got: (x, got[1])),
        bad=BadGradient(),
        head=With(24, 4, lambda x, got: x),
    )


@dataclass(frozen=True, kw_only=True)
class Marked(Toy):
    """The samples numbered ``marked`` have a gradient that is NaN in the layer ``bad`` alone; the loss is finite."""

    build: Callable[[], nn.Module] = bad_gradient
    marked: tuple[int, ...] = ()

    def item(self, index: int, inputs: Tensor, target: int) -> tuple[Any, int]:
        return (inputs[:9], torch.tensor([float(index in self.marked)])), target


def sparse_ends() -> nn.Module:
    """The embedding's gradient is sparse."""
    return chain(embed=nn.Embedding(20, 12, sparse=True), first=(12, 12), act=nn.Tanh(), second=(12, 12), head=(12, 20))


def sparse_and_tied() -> nn.Module:
    """The embedding's table is the output layer's too, where its gradient is dense."""
    model = sparse_ends()
    model.head.weight = model.embed.weight
    return model


# Randomness and statistics ------------------------------------------------------------------------


def normed() -> nn.Module:
    return chain(
        first=(10, 16),
        norm0=nn.BatchNorm1d(16),
        act=nn.ReLU(),
        second=(16, 16),
        norm1=nn.BatchNorm1d(16, momentum=None),
        third=(16, 16),
        head=(16, 4),
    )


class Averaging(nn.Module):
    """Keeps the average of what passes, in one buffer that it replaces and in one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
            self.calls += 1
        return (x - self.average) * self.scale


def averaging() -> nn.Module:
    return chain(first=(10, 16), one=Averaging(), second=(16, 16), two=Averaging(), head=(16, 4))


def dropped() -> nn.Module:
    return chain(
        first=(10, 32), drop0=nn.Dropout(0.3), second=(32, 32), drop1=nn.Dropout(0.3), third=(32, 32), head=(32, 4)
    )
