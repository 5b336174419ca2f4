"""The trial on the driver: which optimizers make updates of whole tensors where workers have shards, one at a time."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, Adafactor, Optimizer

from helpers.conformance import cases
from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import FSDP, HSDP, SHARDED_DDP, fsdp_pipeline
from helpers.files.golden import Golden
from helpers.jobs.matrix_optimizers import Coupled, OfTall, Orthogonal, Preconditioned
from helpers.jobs.optimizers import Global, Keyed, Lookahead, OptimizedDigits, OwnStep, ScheduleFree
from orchestrator.config.schema import StrategyConfig
from orchestrator.job import Job

PIPELINE = fsdp_pipeline("1F1B", 2)


def checked(job: Job, options: StrategyConfig = FSDP, **train: Any) -> tuple[list[str], list[str]]:
    """The errors, and the notes on whole tensors."""
    errors, notes = cases.checked(Case(job=job, options=options, train=having(**train)), 4)
    return errors, [note for note in notes if "whole tensors" in note]


@pytest.mark.parametrize("options", [FSDP, HSDP, PIPELINE, SHARDED_DDP], ids=lambda options: options.name)
def test_the_plan_says_what_is_gathered(options: StrategyConfig) -> None:
    errors, [note] = checked(OfTall(kind=Orthogonal), options)
    assert errors == []
    key = "strategy.shard_optimizer=true" if options is SHARDED_DDP else f"strategy={options.name}"
    assert note.startswith(f"{key}: Orthogonal needs whole tensors: ")
    # Parameter, gradient and momentum of the matrices; AdamW's squares too of the 48 elements of vectors.
    size_bytes = 4 * (3 * (200 + 240 + 144 + 48) + 4 * (20 + 12 + 12 + 4))
    assert f"of the whole model, these are {size_bytes / 2**20:.3g} MiB" in note


def of_matrices(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon([p for p in parameters if p.ndim == 2])


SINGLE = [
    OptimizedDigits(kind=of_matrices),
    OfTall(kind=Preconditioned),
    OfTall(kind=Adafactor),
    OptimizedDigits(kind=Keyed),
]


@pytest.mark.parametrize("job", SINGLE)
def test_optimizers_of_single_tensors_pass(job: Job) -> None:
    for train in ({}, {"ema_decay": 0.9}):
        errors, notes = checked(job, **train)
        assert errors == []
        assert len(notes) == 1


def test_elementwise_optimizers_gather_nothing() -> None:
    assert checked(OptimizedDigits(kind=torch.optim.AdamW)) == ([], [])


class Clipped(OwnStep):
    """Limits the norm of all gradients together, which small tensors with small gradients do not reach."""

    def begin(self) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 100.0)


class Noisy(OwnStep):
    def direction(self, p: nn.Parameter) -> torch.Tensor:
        return super().direction(p) + torch.randn_like(p)


class Large(OwnStep):
    """Refuses small tensors."""

    def direction(self, p: nn.Parameter) -> torch.Tensor:
        if p.numel() < 1000:
            raise ValueError("at least 1000 elements")
        return super().direction(p)


@pytest.mark.parametrize(
    "job",
    [
        OfTall(kind=Coupled),
        *(OptimizedDigits(kind=kind) for kind in (Global, Clipped, Lookahead, Noisy, Large, ScheduleFree)),
    ],
    ids=lambda job: job.kind.__name__,
)
def test_what_needs_more_than_one_tensor_is_refused(job: Job, golden: Golden) -> None:
    for options in (FSDP, SHARDED_DDP):
        [error], notes = checked(job, options)
        assert notes == []
        golden.says(error)


def test_an_optimizer_with_a_closure_is_refused(golden: Golden) -> None:
    [error], _ = checked(OptimizedDigits(kind=LBFGS), SHARDED_DDP)
    golden.says(error)


def test_whole_tensors_are_not_gathered_from_host_memory(golden: Golden) -> None:
    case = Case(job=OfTall(kind=Orthogonal), options=replace(FSDP, cpu_offload=True))
    [error], _ = cases.checked(case, 4, device="cuda")
    golden.says(error)
