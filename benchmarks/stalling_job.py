"""A job that is healthy and slow: its stalls are those of a network file system, of a compiler and of a download."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

from jobs.digits import Digits
from orchestrator.job import Split


@dataclass(frozen=True, kw_only=True)
class Stalling(Digits):
    """Each pause is in seconds; 0 for none.

    Attributes:
        build_s: in building the model.
        compile_s: in the first loss with and the first without gradients.
        open_s: in the first sample that a process reads from each dataset object.
        disk_s: in each sample whose index is a multiple of 151.
        val_s: in each validation sample that is one of 10.
        loss_s: in each training loss, which leaves time for something to happen during a run.
        log_kb: what each training loss prints, in kB.
        noise: how much is added at random to the inputs, from the generators of Python, NumPy and torch.
        cut_json: how many characters of a sample in JSON each training loss prints, as jobs do that show their data.
        fading: whether the optimizer has state of its own.
    """

    build_s: float = 0.0
    compile_s: float = 0.0
    open_s: float = 0.0
    disk_s: float = 0.0
    val_s: float = 0.0
    loss_s: float = 0.0
    log_kb: int = 0
    noise: float = 0.0
    cut_json: int = 0
    fading: bool = False
    compiled: set[bool] = field(default_factory=set, init=False, repr=False)

    def model(self) -> nn.Module:
        time.sleep(self.build_s)
        return super().model()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return Fading(parameters, lr=self.lr) if self.fading else super().optimizer(parameters)

    def dataset(self, split: Split) -> Dataset[Any]:
        return _Slow(super().dataset(split), self, split)

    def loss(self, output: Any, target: Any) -> Tensor:
        if (mode := torch.is_grad_enabled()) not in self.compiled:
            self.compiled.add(mode)
            time.sleep(self.compile_s)
        if mode:
            time.sleep(self.loss_s)
            for _ in range(self.log_kb):
                print("." * 999)
            if self.cut_json:
                print(json.dumps({"id": 1, "token": "分词" * self.cut_json})[: self.cut_json])
        return super().loss(output, target)


class Fading(SGD):
    """Its steps become smaller, by a factor that only ``state_dict()`` tells, and a list has the last directions."""

    def __init__(self, parameters: Any, lr: float):
        self.factor = 1.0
        super().__init__(parameters, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.factor *= 0.97
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            last = self.state[parameter].setdefault("last", [torch.zeros_like(parameter)])
            parameter.grad.mul_(self.factor).add_(last[0], alpha=0.5)
            last[0].copy_(parameter.grad)
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "factor": self.factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.factor = state_dict["factor"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "factor"})


class _Slow(Dataset[Any]):
    def __init__(self, inner: Dataset[Any], job: Stalling, split: Split):
        self.inner, self.job, self.split = inner, job, split
        self.is_open = False

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        if not self.is_open:
            self.is_open = True
            time.sleep(self.job.open_s)
        if index % 151 == 0:
            time.sleep(self.job.disk_s)
        if self.split == "val" and index % 10 == 0:
            time.sleep(self.job.val_s)
        inputs, target = self.inner[index]
        if (scale := self.job.noise) > 0:
            inputs = inputs + scale * (random.random() + float(np.random.rand()) + torch.rand(inputs.shape))
        return inputs, target
