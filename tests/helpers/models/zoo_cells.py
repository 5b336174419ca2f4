"""What becomes of a model of the zoo under a strategy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import pytest
import torch

from helpers.conformance.cases import DDP, SINGLE, Case, config_of, having, plan_of
from helpers.conformance.layouts import (
    FSDP,
    HSDP,
    MODEL_PARALLEL,
    PARAMETER_SERVER,
    SGD,
    ddp_pipeline,
    fsdp_pipeline,
    pipeline,
    whole_model,
)
from helpers.conformance.training import Steps, losses, make, steps, watched
from helpers.models.zoo import ZOO, Staged, Whole
from helpers.ranks.batches import validated
from helpers.ranks.gang import Answer, Gang
from orchestrator.config.schema import StrategyConfig
from orchestrator.protocol.messages import EvalPoint
from orchestrator.strategies import registry
from orchestrator.strategies.asynchronous.hogwild import HogwildConfig
from orchestrator.strategies.asynchronous.locked_sgd import LockedSGDConfig
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.pipelined.layout import StagedConfig
from orchestrator.strategies.replicated.dp import DPConfig

TRAIN = having(steps=4, global_batch_size=8)
STRATEGIES: dict[str, tuple[StrategyConfig, int]] = {
    "single": (SINGLE, 1),
    "ddp": (DDP, 2),
    "fsdp": (FSDP, 2),
    "hsdp": (HSDP, 4),
    "dp": (DPConfig(name="dp", num_workers=2, loss_on="device0", verbose=False), 1),
    "model_parallel": (MODEL_PARALLEL, 2),
    "pipeline": (pipeline("1F1B", 2), 2),
    "ddp_pipeline": (ddp_pipeline("1F1B", 2), 4),
    "fsdp_pipeline": (fsdp_pipeline("1F1B", 2), 4),
    "hogwild": (HogwildConfig(name="hogwild", num_workers=2), 2),
    "locked_sgd": (LockedSGDConfig(name="locked_sgd", num_workers=2, lock="step"), 2),
    "parameter_server sync": (replace(PARAMETER_SERVER, num_shards=1), 3),
    "parameter_server async": (replace(PARAMETER_SERVER, num_shards=1, consistency="async"), 3),
}
"""A strategy with its keys, and the number of its processes."""

Outcome = Literal["equal", "asynchronous", "refused", "wrong"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """``detail``: the largest relative difference of a loss, the reason of a refusal, or what is wrong."""

    outcome: Outcome
    detail: str


def case_of(name: str, strategy: str, *, split: Any = None) -> Case:
    """The job of a model for a strategy; ``split`` None: at the module that the zoo names."""
    options, world_size = STRATEGIES[strategy]
    if not isinstance(options, StagedConfig):
        return Case(job=Whole(name=name), train=TRAIN, options=options, alone=options if world_size == 1 else None)
    split = (f"model.{ZOO[name].split}",) if split is None else split
    return Case(job=Staged(name=name), train=TRAIN, options=replace(options, split=split))


def cell(gang: Gang, name: str, strategy: str, *, split: Any = None) -> Cell:
    """Train a model under a strategy, and compare it with one worker."""
    case, world_size = case_of(name, strategy, split=split), STRATEGIES[strategy][1]
    (errors,) = gang.run(preflight_errors, case, world_size, world_size=1)
    if errors:
        return Cell(outcome="refused", detail=errors[0])
    expected = alone(gang, case.job)
    try:
        answers = gang.ask(trained, case, world_size=world_size)
    except (TimeoutError, EOFError, ConnectionError) as e:
        return Cell(outcome="wrong", detail=f"{type(e).__name__}: {e}")
    if any(answer.error for answer in answers):
        return refusal(answers)
    if not registry.load(case.options.name).is_synchronous(case.options):
        return finite([answer.value for answer in answers], expected)
    return comparison([answer.value for answer in answers], expected)


@cache
def alone(gang: Gang, job: Whole) -> list[tuple[Steps, list[EvalPoint]]]:
    return gang.run(trained, Case(job=job, train=TRAIN), world_size=1)


def preflight_errors(rank: int, case: Case, world_size: int) -> list[str]:
    """What the driver would refuse the job for."""
    config = config_of(case, world_size)
    errors: list[str] = []
    registry.load(config.strategy.name).check_job(config, Outline(case.job, config.train), plan_of(config), errors)
    return errors


def trained(rank: int, case: Case) -> tuple[Steps, list[EvalPoint]]:
    """Train on this rank, and evaluate after the second step and after the last."""
    strategy = make(case, rank)
    first = watched(strategy, steps(strategy, last=2))
    points = [validated(strategy, rank, strategy.job.dataset("val"))]
    rest = watched(strategy, steps(strategy, first=3))
    points.append(validated(strategy, rank, strategy.job.dataset("val")))
    return replace(
        rest,
        loss_sums=first.loss_sums + rest.loss_sums,
        weights=first.weights + rest.weights,
        norms=first.norms + rest.norms,
        skipped=first.skipped + rest.skipped,
    ), points


def means(ranks: list[tuple[Steps, list[EvalPoint]]]) -> list[dict[str, float]]:
    """Validation loss, accuracy and weight of the run, for each evaluation."""
    return [_mean(points) for points in zip(*(points for _, points in ranks), strict=True)]


def _mean(points: tuple[EvalPoint, ...]) -> dict[str, float]:
    weight = sum(point.weight for point in points)
    loss, right = sum(p.loss_sum for p in points), sum(p.sums.get("accuracy", 0.0) for p in points)
    return {"weight": weight, "loss": loss / weight, "accuracy": right / weight}


def comparison(ranks: list[Any], expected: list[Any]) -> Cell:
    """Compare losses, evaluations and final weights."""
    found, wanted = losses([seen for seen, _ in ranks]), losses([seen for seen, _ in expected])
    difference = float(((found - wanted) / wanted).abs().max())
    if not difference <= SGD:
        return Cell(outcome="wrong", detail=f"the losses differ by {difference:.1e}")
    if means(ranks) != [pytest.approx(mean, rel=SGD) for mean in means(expected)]:
        return Cell(outcome="wrong", detail=f"the evaluations are {means(ranks)}, not {means(expected)}")
    try:
        weights = whole_model([seen for seen, _ in ranks])
        torch.testing.assert_close(weights, expected[0][0].model, rtol=100 * SGD, atol=10 * SGD)
    except AssertionError as e:
        return Cell(outcome="wrong", detail=f"the weights differ: {e}")
    return Cell(outcome="equal", detail=f"{difference:.0e}")


def finite(ranks: list[Any], expected: list[Any]) -> Cell:
    """Losses and evaluations must be finite, and every sample must be evaluated."""
    evaluations = means(ranks)
    values = [*losses([seen for seen, _ in ranks]).tolist(), *(v for mean in evaluations for v in mean.values())]
    if not all(map(math.isfinite, values)):
        return Cell(outcome="wrong", detail=f"not finite: {values}")
    if [mean["weight"] for mean in evaluations] != [mean["weight"] for mean in means(expected)]:
        return Cell(outcome="wrong", detail=f"the evaluations are {evaluations}")
    return Cell(outcome="asynchronous", detail="")


def refusal(answers: list[Answer]) -> Cell:
    """A ValueError in words of ours is a refusal; anything else is wrong."""
    errors = [answer.error.partition(": ") for answer in answers if answer.error]
    if reasons := [text for kind, _, text in errors if kind in ("ValueError", "JobError")]:
        return Cell(outcome="refused", detail=reasons[0])
    return Cell(outcome="wrong", detail=next(answer.trace for answer in answers if answer.error))
