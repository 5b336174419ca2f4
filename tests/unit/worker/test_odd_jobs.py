"""Methods of a job that return what nobody can use, or leave the process: one sentence names each, and the remedy."""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.conformance.cases import TRAIN, Case
from helpers.files.golden import Golden
from helpers.jobs.toys import Toy
from helpers.ranks.loops import run_loop
from orchestrator.job import Job, Split
from orchestrator.strategies.data.datasets import DatasetError
from orchestrator.user_code.callbacks import StepEnd
from orchestrator.user_code.errors import JobError, exits_refused
from orchestrator.worker.data.data_loader import DataError
from orchestrator.worker.data.opened import datasets_of

NAMES = {"sys": sys, "os": os, "torch": torch, "nn": nn}


class NegativeLength(list[Any]):
    def __len__(self) -> int:
        return -1


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def failing(error: BaseException) -> Any:
    raise error


@dataclass(frozen=True, kw_only=True)
class Odd(Toy):
    """What ``method`` returns is the value of the expression ``value``, which sees its arguments and its own result."""

    method: str
    value: str

    def _of(self, method: str, usual: Any, **arguments: Any) -> Any:
        if method != self.method:
            return usual
        return eval(self.value, {**globals(), **NAMES, **arguments, "usual": usual})

    def model(self) -> nn.Module:
        return self._of("model", super().model())

    def dataset(self, split: Split) -> Any:
        usual = super().dataset(split)
        usual.items = self._of("items", usual.items)
        return self._of("dataset", usual, split=split)

    @property
    def collate(self) -> Any:
        return self._of("collate", None)

    def sample_weights(self, split: Split) -> Any:
        return self._of("sample_weights", None)

    def batch_sampler(self, dataset: Any, batch_size: int, generator: torch.Generator) -> Any:
        return self._of("batch_sampler", None)

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return self._of("forward", super().forward(model, inputs))

    def loss(self, output: Any, target: Any) -> Tensor:
        return self._of("loss", super().loss(output, target), output=output)

    def weight(self, target: Any) -> Any:
        return self._of("weight", None)

    def parameter_groups(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> Any:
        return self._of("parameter_groups", super().parameter_groups(named_parameters))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self._of("optimizer", super().optimizer(parameters), parameters=parameters)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        return self._of("scheduler", None, optimizer=optimizer, steps=steps)

    @property
    def tokens_per_sample(self) -> int | None:
        return self._of("tokens_per_sample", None)

    def metrics(self, output: Any, target: Any) -> Mapping[str, Tensor]:
        return self._of("metrics", {}, output=output)

    def metric_objects(self, split: Split) -> Mapping[str, Any]:
        return self._of("metric_objects", {})

    def train_metrics(self, output: Any, target: Any) -> Mapping[str, Tensor]:
        return self._of("train_metrics", {}, output=output)

    def on_evaluation(self, evaluations: Any) -> Any:
        return self._of("on_evaluation", None)

    def on_step_end(self, info: StepEnd) -> None:
        return self._of("on_step_end", None)


def trained(job: Job, folder: Path) -> None:
    """Train two steps of a job on one rank, and evaluate it."""
    train = replace(TRAIN, steps=2, eval_every=1, global_batch_size=4)
    with exits_refused():
        _ = job.tokens_per_sample
        datasets_of(job, train.eval_splits)  # the loop reads them before it makes the strategy
        run_loop(0, Case(job=job, train=train), folder)


def test_what_a_method_must_not_return_or_do(tmp_path: Path, golden: Golden) -> None:
    def error(method: str, value: str) -> str:
        with pytest.raises((JobError, DatasetError, DataError)) as error:
            trained(Odd(method=method, value=value), tmp_path)
        return re.sub(r"line \d+", "line N", str(error.value))

    golden.answers("errors/odd-jobs", error)
