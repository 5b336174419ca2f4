"""Small jobs that make their own updates in ``Job.training_step``."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, StepLR
from torch.utils.data import Dataset

from helpers.jobs.toys import Rows
from orchestrator import gather_batch
from orchestrator.job import Job, Split

Models = Mapping[str, nn.Module]
Optimizers = Mapping[str, Optimizer]


def pairs(samples: int, *, seed: int = 17) -> Rows:
    """Samples of ten numbers, each with another ten."""
    random = torch.Generator().manual_seed(seed)
    first, second = torch.randn(samples, 10, generator=random), torch.randn(samples, 10, generator=random)
    return Rows(list(zip(first + 1, second, strict=True)))


@dataclass(frozen=True, kw_only=True)
class GAN(Job):
    """Two models with an optimizer each. Its noise is a part of the samples, so that every layout has the same."""

    samples: int = 200
    lr: float = 2e-3

    def model(self) -> nn.Module:
        generator = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 10))
        discriminator = nn.Sequential(nn.Linear(10, 24), nn.LeakyReLU(), nn.Linear(24, 1))
        return nn.ModuleDict({"generator": generator, "discriminator": discriminator})

    def dataset(self, split: Split) -> Dataset[Any] | None:
        return pairs(self.samples) if split == "train" else None

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.Adam(parameters, lr=self.lr)

    def training_step(self, models: Models, batch: Any, optimizers: Optimizers) -> Mapping[str, Tensor]:
        real, noise = batch
        generator, discriminator = models["generator"], models["discriminator"]
        fake = generator(noise)
        of_discriminator = _judged(discriminator(real), 1.0) + _judged(discriminator(fake.detach()), 0.0)
        of_discriminator.backward()
        self.update(optimizers["discriminator"])
        of_generator = _judged(discriminator(fake), 1.0)
        of_generator.backward()
        self.update(optimizers["generator"])
        return {"loss": of_generator, "discriminator": of_discriminator}

    def update(self, optimizer: Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()


def _judged(logits: Tensor, wanted: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, wanted))


class ScheduledGAN(GAN):
    """The generator has another kind of optimizer, and each model its own schedule."""

    def optimizers(self, models: Models) -> Optimizers:
        return {
            "generator": torch.optim.SGD(models["generator"].parameters(), lr=0.05, momentum=0.9),
            "discriminator": torch.optim.Adam(models["discriminator"].parameters(), lr=self.lr),
        }

    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        if isinstance(optimizer, torch.optim.SGD):
            return ExponentialLR(optimizer, 0.9)
        return StepLR(optimizer, step_size=2, gamma=0.5)


class NormedGAN(GAN):
    """Its models have buffers that forward passes change.

    Not with Adam, which magnifies the rounding errors that are the gradient of a bias before BatchNorm.
    """

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def model(self) -> nn.Module:
        generator = nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))
        discriminator = nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.LeakyReLU(), nn.Linear(24, 1))
        return nn.ModuleDict({"generator": generator, "discriminator": discriminator})


@dataclass(frozen=True, kw_only=True)
class Distillation(Job):
    """A student and a frozen teacher in eval mode."""

    samples: int = 200

    def model(self) -> nn.Module:
        teacher = nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.Dropout(0.5), nn.ReLU(), nn.Linear(24, 4))
        student = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 4))
        return nn.ModuleDict({"teacher": teacher.requires_grad_(False).eval(), "student": student})

    def dataset(self, split: Split) -> Dataset[Any]:
        return pairs(self.samples if split == "train" else 16, seed=17 if split == "train" else 18)

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        assert isinstance(model, nn.ModuleDict)
        return model["student"](inputs), model["teacher"](inputs)

    def loss(self, output: Any, target: Any) -> Tensor:
        student, teacher = output
        return F.mse_loss(student, teacher)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def training_step(self, models: Models, batch: Any, optimizers: Optimizers) -> Tensor:
        inputs, _ = batch
        with torch.no_grad():
            wanted = models["teacher"](inputs)
        loss = F.mse_loss(models["student"](inputs), wanted)
        loss.backward()
        optimizers["student"].step()
        return loss


class Encoder(nn.Module):
    """An encoder with the temperature of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 8))
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.normalize(self.layers(inputs), dim=-1)


@dataclass(frozen=True, kw_only=True)
class Contrastive(Job):
    """Each sample has to find its partner among those of the whole global batch."""

    samples: int = 200

    def model(self) -> nn.Module:
        return Encoder()

    def dataset(self, split: Split) -> Dataset[Any] | None:
        return Rows([(x, x + 0.1 * y) for x, y in pairs(self.samples).items]) if split == "train" else None

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)

    def training_step(self, models: Models, batch: Any, optimizers: Optimizers) -> Tensor:
        encoder = models["model"]
        one, other = (gather_batch(encoder(part)) for part in batch)
        logits = one @ other.T * encoder.temperature.exp()
        loss = F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))
        loss.backward()
        optimizers["model"].step()
        return loss


class Parts(nn.Module):
    """Tables and heads of which a batch uses only some."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.head = nn.Linear(10, 4)
        self.rare = nn.Linear(10, 4)
        self.never = nn.Linear(10, 4)
        self.table = nn.Embedding(5, 4, sparse=sparse)


@dataclass(frozen=True, kw_only=True)
class SomeParts(Job):
    """``rare`` and ``table`` get gradients from few samples, ``never`` from none."""

    sparse: bool = False

    def model(self) -> nn.Module:
        return Parts(sparse=self.sparse)

    def dataset(self, split: Split) -> Dataset[Any] | None:
        return pairs(200) if split == "train" else None

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.0 if self.sparse else 0.9, weight_decay=0.0)

    def training_step(self, models: Models, batch: Any, optimizers: Optimizers) -> Tensor:
        model, (inputs, _) = models["model"], batch
        assert isinstance(model, Parts)
        output = model.head(inputs).square().sum(dim=-1)
        chosen = inputs[:, 0] > 2.5
        if chosen.any():
            numbers = inputs[chosen][:, 1].abs().long() % 5
            extra = model.rare(inputs[chosen]) + model.table(numbers)
            output = output.index_add(0, chosen.nonzero()[:, 0], extra.square().sum(dim=-1))
        loss = output.mean()
        loss.backward()
        optimizers["model"].step()
        return loss


STEP_JOBS = {
    "gan": GAN(),
    "gan-scheduled": ScheduledGAN(),
    "distillation": Distillation(),
    "contrastive": Contrastive(),
    "some-parts": SomeParts(),
    "some-parts-sparse": SomeParts(sparse=True),
}
