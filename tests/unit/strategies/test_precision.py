"""What ``train.precision`` means, and what refuses it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.conformance.cases import DDP, Case, checked, config_of, having, plan_of
from helpers.conformance.layouts import HOGWILD, LOCKED, PARAMETER_SERVER
from helpers.files.golden import Golden
from helpers.jobs.quick_jobs import digits
from helpers.jobs.step_toys import GAN
from orchestrator.config.build import ConfigError
from orchestrator.config.schema import StrategyConfig
from orchestrator.model.precision import Precision, summable
from orchestrator.strategies.measure.device import precision_error, set_tf32
from orchestrator.strategies.trained import GROWTH_STEPS, INITIAL, LossScale


def test_the_scale_is_halved_by_an_overflow_and_doubled_after_many_updates() -> None:
    scale = LossScale().after(finite=True).after(finite=False)
    assert scale == LossScale(INITIAL / 2, 0)
    for _ in range(GROWTH_STEPS - 1):
        scale = scale.after(finite=True)
    assert scale == LossScale(INITIAL / 2, GROWTH_STEPS - 1)
    assert scale.after(finite=True) == LossScale(INITIAL, 0)


def test_the_scale_does_not_fall_below_one() -> None:
    scale, steps = LossScale(), 0
    while scale.can_fall:
        scale, steps = scale.after(finite=False), steps + 1
    assert (scale, steps) == (LossScale(1.0), 16)
    assert scale.after(finite=False) == scale


def test_a_checkpoint_keeps_the_scale() -> None:
    scale = LossScale(8.0, 5)
    assert LossScale.of_state(scale.state()) == scale
    assert LossScale.of_state(None) == LossScale()


@pytest.mark.parametrize("enabled", [True, False])
def test_matrix_products_and_convolutions_are_computed_in_the_same_type(enabled: bool) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        set_tf32(enabled)
        assert (torch.get_float32_matmul_precision() == "high") == enabled
        assert torch.backends.cudnn.allow_tf32 == enabled
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_bfloat16_converts_what_is_floating_and_nothing_else() -> None:
    precision = Precision.named("bf16-true", "cpu")
    model = precision.converted(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))()
    assert {t.dtype for t in model.state_dict().values()} == {torch.bfloat16, torch.int64}
    numbers, image, labels = torch.arange(2), torch.rand(2), [torch.tensor(True)]
    given = precision.inputs({"tokens": numbers, "image": image, "labels": labels})
    assert (given["tokens"].dtype, given["image"].dtype) == (torch.int64, torch.bfloat16)
    assert given["labels"][0].dtype == torch.bool
    assert precision.outputs(given)["image"].dtype == torch.float32
    assert Precision.named("fp32", "cpu").inputs(labels) is labels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_not_of_16_bits(dtype: torch.dtype) -> None:
    assert summable(torch.ones((), dtype=dtype)).dtype == torch.float32
    assert summable(torch.ones((), dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    ("precision", "has_bf16", "refused"),
    [("bf16", False, True), ("bf16-true", False, True), ("bf16", True, False), ("fp16", False, False)],
)
def test_a_gpu_without_bfloat16_is_refused(precision: str, has_bf16: bool, refused: bool, golden: Golden) -> None:
    error = precision_error(precision, device_name="Tesla V100", has_bf16=has_bf16)
    assert (error is not None) == refused
    if refused:
        golden.says(error)


@pytest.mark.needs("asynchronous")
@pytest.mark.parametrize(
    ("options", "keys", "precision", "said"),
    [
        (HOGWILD, {}, "fp16", "strategy=hogwild: its workers update one after another"),
        (LOCKED, {}, "fp16", "strategy=locked_sgd: its workers update one after another"),
        (PARAMETER_SERVER, {}, "fp16", "strategy=parameter_server: its workers push gradients before"),
        (
            PARAMETER_SERVER,
            {"consistency": "async"},
            "bf16-true",
            "strategy=parameter_server: its servers hold the parameters as the job builds them",
        ),
    ],
)
def test_the_plan_refuses_what_a_strategy_does_not_support(
    options: StrategyConfig, keys: dict[str, Any], precision: str, said: str
) -> None:
    options = replace(options, **keys)
    case = Case(job=digits(), options=options, train=having(precision=precision))
    with pytest.raises(ConfigError, match=f"train.precision={precision}: {said}.*; set it to bf16 or fp32"):
        plan_of(config_of(case, 2 + getattr(options, "num_shards", 0)))


def test_tf32_on_a_cpu_is_noted(golden: Golden) -> None:
    config = config_of(Case(job=digits(), train=having(precision="tf32")), 2)
    golden.says(plan_of(config).notes)


@pytest.mark.parametrize("precision", ["fp16", "bf16-true"])
def test_a_job_that_makes_its_own_updates_is_refused(precision: str) -> None:
    errors, _ = checked(Case(job=GAN(), train=having(precision=precision)), 2)
    assert [e for e in errors if e.startswith(f"train.precision={precision}: the job overrides Job.training_step")]


def test_powersgd_is_refused_with_a_scaled_loss() -> None:
    options = replace(DDP, comm_hook="powersgd")
    [error], _ = checked(Case(job=digits(), options=options, train=having(precision="fp16")), 2)
    assert error.startswith("strategy.comm_hook=powersgd: ")
