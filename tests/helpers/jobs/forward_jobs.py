"""Jobs that call their models in ways of their own, which stages have to record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.jobs.quick_jobs import QuickDigits, TinyGPT
from orchestrator import Evaluation, Steering, current_step
from orchestrator.job import Split


def shifted(items: list[Any]) -> Any:
    images = torch.stack([image for image, _ in items])
    return {"images": images, "shift": images.flatten(1).mean(1)}, torch.tensor([label for _, label in items])


class Shifting(nn.Module):
    """Takes several arguments by name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))
        self.head, self.scale = nn.Linear(width, 10), nn.Parameter(torch.ones(10))

    def forward(self, images: Tensor, *, shift: Tensor) -> Tensor:
        x = self.first(images.flatten(1)) + shift[:, None]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@dataclass(frozen=True, kw_only=True)
class Called(QuickDigits):
    """Calls its model by keywords, between what it does to its input and its output, another thing in evaluation."""

    hidden: int = 24
    lr: float = 0.2
    adamw: bool = False
    val_size: int | None = 45

    def model(self) -> nn.Module:
        return Shifting(self.hidden)

    @property
    def collate(self) -> Any:
        return shifted

    def forward(self, model: Any, inputs: Any) -> Any:
        centred = inputs["images"].flatten(1) - inputs["shift"][:, None]
        logits = model(centred, shift=inputs["shift"]) * model.scale
        if not model.training:
            logits = logits / 2
        return {"logits": logits, "rows": (logits.square().mean(-1),)}

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], target) + 0.01 * output["rows"][0].mean()

    def metrics(self, output: Any, target: Tensor) -> Any:
        return {"right": (output["logits"].argmax(-1) == target).sum(), "rows": output["rows"][0].sum()}

    def optimizer(self, parameters: Any) -> Any:
        kind = torch.optim.AdamW if self.adamw else torch.optim.SGD
        return kind(parameters, lr=self.lr / 20 if self.adamw else self.lr)

    def sample(self, model: nn.Module, generator: torch.Generator) -> str:
        inputs, _ = shifted([self.dataset("val")[i] for i in range(4)])
        return repr(round(float(self.forward(model, inputs)["logits"].sum()), 4))


@dataclass(frozen=True, kw_only=True)
class Inner(Called):
    """Calls the parts of its model, and not the model."""

    def forward(self, model: Any, inputs: Any) -> Any:
        x = model.first(inputs["images"].flatten(1)) + inputs["shift"][:, None]
        for block in model.blocks:
            x = F.layer_norm(x + block(x), (self.hidden,))
        logits = model.head(x)
        return {"logits": logits, "rows": (logits.mean(-1),)}


@dataclass(frozen=True, kw_only=True)
class OfSequential(Called):
    """Its model is an ``nn.Sequential``, which only calls its children."""

    def model(self) -> nn.Module:
        wide = [layer for _ in range(3) for layer in (nn.Linear(self.hidden, self.hidden), nn.Tanh())]
        return nn.Sequential(nn.Flatten(), nn.Linear(64, self.hidden), *wide, nn.Linear(self.hidden, 10))

    def forward(self, model: Any, inputs: Any) -> Any:
        logits = 2 * model(inputs["images"]) + inputs["shift"][:, None]
        return {"logits": logits, "rows": (logits.mean(-1),)}


@dataclass(frozen=True, kw_only=True)
class Tempered(TinyGPT):
    """A language model whose logits the job divides by a temperature."""

    layers: int = 4
    temperature: float = 2.0

    def forward(self, model: Any, inputs: Any) -> Any:
        return model(inputs) / self.temperature

    def dataset(self, split: Split) -> Any:
        windows: Any = super().dataset(split)
        return windows if split == "train" else [windows[i] for i in range(13)]


@dataclass(frozen=True, kw_only=True)
class ReadsValues(Called):
    def forward(self, model: Any, inputs: Any) -> Any:
        output = super().forward(model, inputs)
        return {**output, "logits": output["logits"] * float(inputs["shift"].sum())}


@dataclass(frozen=True, kw_only=True)
class ReadsStep(Called):
    def forward(self, model: Any, inputs: Any) -> Any:
        output = super().forward(model, inputs)
        return {**output, "logits": output["logits"] * current_step()}


@dataclass(frozen=True, kw_only=True)
class CallsTwice(Called):
    def forward(self, model: Any, inputs: Any) -> Any:
        first, second = (super(CallsTwice, self).forward(model, inputs)["logits"] for _ in range(2))
        return {"logits": first + second, "rows": (first.mean(-1),)}


TABLE = torch.linspace(0, 1, 10)


@dataclass(frozen=True, kw_only=True)
class HasTable(Called):
    """Uses a tensor that is no part of the model."""

    def forward(self, model: Any, inputs: Any) -> Any:
        output = super().forward(model, inputs)
        return {**output, "logits": output["logits"] + TABLE}


@dataclass(frozen=True, kw_only=True)
class ByHand(Called):
    def stages(self, model: Any) -> Any:
        return [model.first, model.head]


@dataclass(frozen=True, kw_only=True)
class Steered(Called):
    temperature: float = 1.0
    steerable: ClassVar[tuple[str, ...]] = ("temperature",)

    def on_evaluation(self, evaluations: tuple[Evaluation, ...]) -> Steering:
        return Steering(fields={"temperature": 0.5})


REFUSED = {
    ReadsValues: "the job: its forward() fails with random values in place of a batch",
    ReadsStep: "the job: its forward() calls current_step() outside of the layers",
    CallsTwice: "its forward() calls no layer exactly once",
    HasTable: "a tensor of shape [10] is neither an attribute of the model nor computed from its input",
    ByHand: "the job overrides Job.forward, and Job.stages says what stages do in its place",
    Steered: "a recording of Job.forward, which does not see what Job.on_evaluation changes (temperature)",
}
