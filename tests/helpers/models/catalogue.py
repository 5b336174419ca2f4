"""Every model that is trained under every strategy, by name, and the jobs that train one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from helpers.jobs.toys import Rows
from helpers.models import rarer_tricks, token_tricks, tricks
from helpers.models.by_hand import BY_HAND
from helpers.models.hf_table import TABLE
from helpers.models.libraries import LIBRARIES
from helpers.models.tasks import Exhibit, Reversible
from helpers.models.zoo import ZOO
from orchestrator.job import Job, Split

MODELS: dict[str, Exhibit] = {**BY_HAND, **ZOO, **LIBRARIES, **TABLE}
GENERATED: dict[str, Reversible] = {
    **{f"features/{name}": tricks.Tricky(trick=name) for name in rarer_tricks.tricks()},
    **{f"tokens/{name}": token_tricks.Tricky(trick=name) for name in token_tricks.TRICKS},
}
"""Models that are made of a trick at a place, under names ``FAMILY/TRICK at PLACE``."""
ADAMW_LR = 1e-3


@dataclass(frozen=True, kw_only=True)
class Whole(Reversible):
    """A model as it is, by its name in ``MODELS``. A batch that is a dict gives it keyword arguments."""

    name: str
    adamw: bool = False

    @property
    def exhibit(self) -> Exhibit:
        return MODELS[self.name]

    def model(self) -> nn.Module:
        return self.exhibit.build()

    def dataset(self, split: Split) -> Rows:
        return _samples(self.name, split)

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model(**inputs)

    def loss(self, output: Any, target: Any) -> Tensor:
        loss: Tensor | None = output.loss if self.exhibit.task.has_own_loss else None
        return self.exhibit.task.loss(self._results(output), target) if loss is None else loss

    def weight(self, target: Any) -> Tensor | None:
        return self.exhibit.task.weight(target)

    def metrics(self, output: Any, target: Any) -> Mapping[str, Tensor]:
        return self.exhibit.task.metrics(self._results(output), target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.adamw:
            return torch.optim.AdamW(parameters, lr=ADAMW_LR, eps=1e-5)  # so that rounding is not a whole update
        return torch.optim.SGD(parameters, lr=self.exhibit.lr)

    def _results(self, output: Any) -> tuple[Tensor, ...]:
        return tuple(getattr(output, name) for name in self.exhibit.task.result)


class TakesDict(nn.Module):
    """Takes a batch as it is, and returns the outputs that the loss needs."""

    def __init__(self, model: nn.Module, exhibit: Exhibit):
        super().__init__()
        self.model = model
        self.exhibit = exhibit

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        output = self.model(**{name: t for name, t in batch.items() if name not in self.exhibit.not_in_stages})
        return tuple(getattr(output, name) for name in self.exhibit.task.result)


class Staged(Whole):
    """The same model for stages: the job leaves ``forward`` as it is, and computes the loss."""

    forward = Job.forward

    def model(self) -> nn.Module:
        return TakesDict(super().model(), self.exhibit)

    def loss(self, output: Any, target: Any) -> Tensor:
        return self.exhibit.task.loss(output, target)

    def _results(self, output: Any) -> tuple[Tensor, ...]:
        return output


class Direct(Whole):
    """A model that is called with the inputs alone, whole and in stages, and whose loss is the task's."""

    forward = Job.forward

    def loss(self, output: Any, target: Any) -> Tensor:
        return self.exhibit.task.loss(output, target)

    def _results(self, output: Any) -> Any:
        return output


def package_of(name: str) -> str:
    """Where a model comes from, in words."""
    return f"generated, {name.partition('/')[0]}" if name in GENERATED else MODELS[name].package


def job_of(name: str, *, in_stages: bool = False, adamw: bool = False) -> Reversible:
    """The job that trains a model; ``in_stages``: one that pipelines take. Generated ones have SGD."""
    if name in GENERATED:
        return GENERATED[name]
    kind = (Staged if in_stages else Whole) if MODELS[name].task.named else Direct
    return kind(name=name, adamw=adamw)


@cache
def _samples(name: str, split: Split) -> Rows:
    random = torch.Generator().manual_seed(17 if split == "train" else 18)
    samples = 24 if split == "train" else 11  # the last batch of an evaluation is padded
    return Rows([MODELS[name].task.item(number, random) for number in range(samples)])
