"""Methods of a job that reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from helpers.jobs.toys import Toy
from orchestrator import StepEnd

sent: list[Mapping[str, Any]] = []


def send(**values: Any) -> None:
    sent.append(values)


class Decoder(nn.Sequential):
    def decode(self, noise: Tensor) -> Tensor:
        return self(noise.repeat(1, 5)).reshape(-1, 2, 2)


@dataclass(frozen=True, kw_only=True)
class Example(Toy):
    latent: int = 2

    def model(self) -> nn.Module:
        return Decoder(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4))

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(dim=-1) == target).sum()}

    # the example


def check() -> None:
    job: Any = Example()
    model = job.model()
    assert job.sample(model, torch.Generator())["faces"].shape == (16, 2, 2)
    for step in (99, 100):
        job.on_step_end(StepEnd(step=step, steps=200, samples_seen=step, loss=torch.tensor(0.5), lr=0.1, model=model))
    assert sent == [{"step": 100, "loss": 0.5, "lr": 0.1}]
