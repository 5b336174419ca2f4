"""Options of ``ddp`` that exclude each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.conformance.cases import DDP, Case, checked, config_of, having, plan_of
from helpers.jobs.quick_jobs import QuickDigits, digits
from orchestrator.strategies import registry
from orchestrator.strategies.replicated.buckets import bucket_arguments, bucket_mb_for


@pytest.mark.parametrize(
    ("train", "options", "said"),
    [
        ({}, {}, []),
        ({"grad_accumulation": 2}, {}, ["train.grad_accumulation=2; set that to 1"]),
        ({"compile": True}, {"bucket_mb": 25}, ["train.compile=false"]),
        ({}, {"find_unused_parameters": True}, ["strategy.find_unused_parameters=false"]),
    ],
    ids=["alone", "accumulation", "compiled", "unused parameters"],
)
def test_a_static_graph_is_refused_where_the_graph_is_not_static(
    train: dict[str, Any], options: dict[str, Any], said: list[str]
) -> None:
    case = Case(job=digits(), options=replace(DDP, static_graph=True, **options), train=having(**train))
    errors, _ = checked(case, 2)
    assert len(errors) == len(said)
    for error, part in zip(errors, said, strict=True):
        assert error.startswith("strategy.static_graph=true: ")
        assert part in error


def parameters(mb: float) -> list[Tensor]:
    frozen = torch.empty(2**30, device="meta")
    return [frozen, torch.empty(int(mb * 2**18), device="meta", requires_grad=True)]


@pytest.mark.parametrize(("gradients_mb", "chosen_mb"), [(0, 25), (200, 25), (400, 50), (1600, 200), (4000, 200)])
def test_auto_buckets_on_gpus_are_an_eighth_of_the_gradients(gradients_mb: float, chosen_mb: float) -> None:
    assert bucket_mb_for(parameters(gradients_mb), "auto", device="cuda") == chosen_mb
    assert bucket_mb_for(parameters(gradients_mb), "auto", device="cpu") == 25
    assert bucket_mb_for(parameters(gradients_mb), 3.5, device="cuda") == 3.5


def test_the_first_bucket_stays_small_on_a_gpu_where_torch_chooses() -> None:
    few, many = parameters(40), parameters(800)
    assert bucket_arguments(few, "auto", device="cuda") == {}
    assert bucket_arguments(many, "auto", device="cuda") == {"bucket_cap_mb": 100}
    assert (
        bucket_arguments(few, "auto", device="cpu") == bucket_arguments(few, 25, device="cuda") == {"bucket_cap_mb": 25}
    )


@dataclass(frozen=True, kw_only=True)
class Wide(QuickDigits):
    """A model with 400 MiB of gradients."""

    def model(self) -> nn.Module:
        return nn.Linear(100 * 2**10, 2**10, bias=False)


def test_a_size_that_auto_chooses_is_said() -> None:
    case = Case(job=Wide(), options=replace(DDP, bucket_mb="auto"))
    config = config_of(case, 2)
    plan, check = plan_of(config), registry.load("ddp").check
    on_gpus = replace(plan, device="cuda")
    assert check(config, case.job, on_gpus, []) == ("strategy.bucket_mb=auto: gradient buckets of 50 MiB",)
    half = replace(config, train=having(precision="bf16-true"))
    assert check(config, case.job, plan, []) == check(half, case.job, on_gpus, []) == ()
