"""Equal losses and equal metrics, for every registered synchronous strategy with its default keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.cases import Case, having, plan_of
from helpers.cases import config_of as config_for
from helpers.gang import Gang
from helpers.quick_jobs import MeasuredDigits
from helpers.training import losses, metrics_of, train
from orchestrator.config.compose import compose
from orchestrator.config.overrides import choices
from orchestrator.config.schema import StrategyConfig
from orchestrator.strategies import registry


def default_options(name: str) -> StrategyConfig:
    errors: list[str] = []
    config, _ = compose([f"strategy={name}"], errors, registry.config_class)
    assert config is not None, errors
    return config.strategy


SYNCHRONOUS = [n for n in choices("strategy") if registry.load(n).is_synchronous(default_options(n))]


def test_the_registry_knows_the_synchronous_strategies() -> None:
    assert {"single", "ddp", "dp", "model_parallel", "pipeline", "ddp_pipeline", "parameter_server"} <= {*SYNCHRONOUS}
    assert not {"hogwild", "locked_sgd"} & {*SYNCHRONOUS}


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_synchronous_strategy_has_the_losses_and_the_metrics_of_single(gang: Gang, name: str) -> None:
    options = default_options(name)
    case = Case(
        job=MeasuredDigits(hidden=24, depth=3),
        train=having(global_batch_size=48, steps=20, clip_value=0.05),
        options=options,
        alone=options,
    )
    # "auto" is what a machine without GPUs gets.
    workers = registry.load(name).default_num_workers(options, gpus=(), spares=0)
    plan = plan_of(config_for(case, workers + getattr(options, "num_shards", 0)))
    in_slices = replace(case, train=having(case.train, grad_accumulation=2))
    ranks = gang.run(train, in_slices, world_size=plan.world_size)
    (alone,) = gang.run(train, Case(job=case.job, train=case.train), world_size=1)
    (free,) = gang.run(train, Case(job=case.job, train=replace(case.train, clip_value=None)), world_size=1)
    assert losses([alone])[-1] < losses([alone])[0], "nothing was learned, so nothing is compared"
    assert (losses([free]) - losses([alone])).abs().max() > 1e-3, "nothing was clipped"
    torch.testing.assert_close(losses(ranks), losses([alone]), rtol=1e-5, atol=0)
    expected = metrics_of([alone])
    assert len({metrics["large/logit"] for metrics in expected}) == len(expected), "they are not those of each step"
    torch.testing.assert_close(metrics_of(ranks), expected, rtol=1e-5, atol=1e-6)
