"""What becomes of a model under a strategy."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from helpers.conformance.cases import DDP, SINGLE, Case, config_of, having, options_of, plan_of
from helpers.conformance.layouts import (
    ADAMW,
    DP,
    FSDP,
    HOGWILD,
    HSDP,
    LOCKED,
    MODEL_PARALLEL,
    SGD,
    SHARDED_DDP,
    ddp_pipeline,
    fsdp_pipeline,
    mesh,
    pipeline,
    whole_model,
)
from helpers.conformance.reference import trained_plainly
from helpers.conformance.training import Steps, losses, make, steps, watched
from helpers.models.catalogue import ADAMW_LR, MODELS, job_of
from helpers.ranks.batches import validated
from helpers.ranks.gang import Answer, Gang
from orchestrator.config.schema import StrategyConfig
from orchestrator.driver.preflight.child_checks import check_job
from orchestrator.model.batch import num_rows, split_batch
from orchestrator.planning.mesh import Mesh
from orchestrator.protocol.messages import EvalPoint
from orchestrator.strategies import registry
from orchestrator.strategies.data.datasets import make_batch
from orchestrator.strategies.keys import MeshConfig

TRAIN = having(steps=3, global_batch_size=8, check="always")
STRATEGIES: dict[str, tuple[StrategyConfig, int]] = {
    "single": (SINGLE, 1),
    "ddp": (DDP, 2),
    "ddp, optimizer sharded": (SHARDED_DDP, 2),
    "fsdp": (FSDP, 2),
    "hsdp": (HSDP, 4),
    "dp": (DP, 1),
    "model_parallel": (MODEL_PARALLEL, 2),
    "pipeline": (pipeline("1F1B", 2), 2),
    "pipeline, zero bubble": (pipeline("ZBVZeroBubble", 4), 2),
    "ddp_pipeline": (ddp_pipeline("1F1B", 2), 4),
    "fsdp_pipeline": (fsdp_pipeline("1F1B", 2), 4),
    "mesh": (mesh(Mesh(pipeline=2, shard=2), shard_optimizer=True).options, 4),
    "hogwild": (HOGWILD, 2),
    "locked_sgd": (LOCKED, 2),
    "parameter_server sync": (options_of("parameter_server", num_shards=1, num_workers=2, consistency="sync"), 3),
    "parameter_server async": (options_of("parameter_server", num_shards=1, num_workers=2, consistency="async"), 3),
}
STRATEGIES = {name: of for name, of in STRATEGIES.items() if of[0].name in registry.NAMES}  # a feature may be missing
"""A strategy with its keys, and the number of its processes."""
WHOLE_DDP = replace(DDP, bucket_mb="auto")
DIVIDED: dict[str, tuple[StrategyConfig, int]] = {
    "ddp, tensor": (replace(WHOLE_DDP, tensor=2), 2),
    "ddp, sequence": (replace(WHOLE_DDP, tensor=2, sequence=True), 2),
    "fsdp, context": (replace(FSDP, context=2), 2),
    "fsdp, tensor": (replace(FSDP, num_workers=4, tensor=2), 4),
    "fsdp, sequence": (replace(FSDP, num_workers=4, tensor=2, sequence=True), 4),
    "fsdp, context, tensor": (replace(FSDP, num_workers=4, context=2, tensor=2), 4),
    "pipeline, tensor": (replace(pipeline("1F1B", 2), tensor=2), 4),
    "pipeline, context": (replace(pipeline("1F1B", 2), context=2), 4),
}
"""The same, for models with blocks whose layers can be divided, or whose samples can be divided by tokens."""
EVERY = STRATEGIES | DIVIDED
SYNCHRONOUS = [name for name, (options, _) in STRATEGIES.items() if registry.load(options.name).is_synchronous(options)]

LIMIT_S = 300.0
"""Of a cell, which takes about two seconds on an idle machine."""
NOISE, MOST = 10, 1e-3
"""A difference of so many times what the order of samples makes is rounding, up to a limit."""
COARSE = 4 * torch.finfo(torch.bfloat16).eps

Outcome = Literal["equal", "asynchronous", "by nature", "refused", "wrong", "crash", "hang", "no model"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What became of a model under a strategy.

    Attributes:
        outcome: ``by nature`` if it differs and the run warns of that, ``no model`` if the plain loop fails.
        detail: the largest relative difference of a loss, the reason of a refusal, the warning, or what is wrong.
    """

    outcome: Outcome
    detail: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a rank saw, and what it evaluated after the last step; ``warnings`` are those of its set-up."""

    steps: Steps
    points: list[EvalPoint]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A plain loop: each step, sums over the validation set by name, and what rounding does to a loss."""

    steps: Steps
    evaluation: dict[str, float]
    noise: float


def case_of(name: str, strategy: str, *, adamw: bool = False, split: Any = None) -> Case:
    """The job of a model for a strategy; ``split`` None: at the module that the model names."""
    options, world_size = EVERY[strategy]
    in_stages = isinstance(options, MeshConfig) and options.pipeline != 1
    if in_stages:
        place = MODELS[name].split if name in MODELS else ""
        has_two = strategy != "pipeline, zero bubble"
        at = (f"model.{place}",) if place and has_two else "auto"
        options = replace(options, split=at if split is None else split)  # type: ignore[call-arg]
    job = job_of(name, in_stages=in_stages, adamw=adamw)
    return Case(job=job, train=TRAIN, options=options, alone=options if world_size == 1 else None)


def cell(gang: Gang, name: str, strategy: str, *, adamw: bool = False, split: Any = None) -> Cell:
    """Train a model under a strategy, and compare it with a plain loop."""
    case, world_size = case_of(name, strategy, adamw=adamw, split=split), EVERY[strategy][1]
    try:
        expected = plain_of(gang, name, adamw)
    except (AssertionError, TimeoutError) as e:
        return Cell(outcome="no model", detail=str(e).strip().splitlines()[-1])
    try:
        ((notes, errors),) = gang.run(preflight, case, world_size, world_size=1, timeout_s=LIMIT_S)
        if errors:
            return Cell(outcome="refused", detail=errors[0])
        answers = gang.ask(trained, case, world_size=world_size, timeout_s=LIMIT_S)
    except (AssertionError, EOFError, ConnectionError) as e:
        return Cell(outcome="crash", detail=f"{type(e).__name__}: {e}")
    except TimeoutError as e:
        return Cell(outcome="hang", detail=str(e))
    if any(answer.error for answer in answers):
        return refusal(answers)
    ranks = [answer.value for answer in answers]
    if not registry.load(case.options.name).is_synchronous(case.options):
        return finite(ranks, expected)
    rtol = COARSE if name in MODELS and MODELS[name].coarse else ADAMW if adamw else SGD
    found = comparison(ranks, expected, rtol, atol=2 * TRAIN.steps * ADAMW_LR if adamw else 0.0)
    if found.outcome == "wrong" and (said := explained([*notes, *ranks[0].warnings])):
        return Cell(outcome="by nature", detail=said)
    return found


def explained(said: Sequence[str]) -> str:
    """The note or warning that the strategy trains another model than one worker; empty if there is none."""
    return next((text for text in said if "trains otherwise" in text or "BatchNorm" in text), "")


@cache
def plain_of(gang: Gang, name: str, adamw: bool) -> Plain:
    (plain,) = gang.run(trained_plainly_twice, name, adamw, world_size=1, timeout_s=LIMIT_S)
    return plain


def trained_plainly_twice(rank: int, name: str, adamw: bool) -> Plain:
    """Train in a plain loop, evaluate in batches of the same size, and train once more with each batch in reverse."""
    job = job_of(name, adamw=adamw)
    seen, again = (trained_plainly(Case(job=one, train=TRAIN)) for one in (job, replace(job, backwards=True)))
    model = seen.model.eval()
    sums: Counter[str] = Counter()
    samples, size = list(job.dataset("val").items), TRAIN.global_batch_size
    for first in range(0, len(samples), size):
        inputs, target = split_batch(make_batch(None, samples[first : first + size]))
        with torch.no_grad():
            output = job.forward(model, inputs)
            weight = job.weight(target)
            weight = num_rows(target) if weight is None else int(weight)
            sums.update(weight=weight, loss=float(job.loss(output, target)) * weight)
            sums.update({key: float(value) for key, value in job.metrics(output, target).items()})
    noise = largest(losses([again.steps]), losses([seen.steps]))
    return Plain(steps=seen.steps, evaluation=dict(sums), noise=noise)


def largest(found: Tensor, wanted: Tensor) -> float:
    """The largest relative difference."""
    return float(((found - wanted) / wanted).abs().max())


def preflight(rank: int, case: Case, world_size: int) -> tuple[tuple[str, ...], list[str]]:
    """The notes of the driver, and what it would refuse the job for."""
    config = config_of(case, world_size)
    errors: list[str] = []
    notes = check_job(registry.load(config.strategy.name), config, case.job, plan_of(config), errors)
    return notes, errors


def trained(rank: int, case: Case) -> Result:
    """Train on this rank, and evaluate after the last step."""
    strategy = make(case, rank, refused_by_one=True)
    warnings = tuple(remark.text for remark in strategy.setup_warnings())
    seen = watched(strategy, steps(strategy, want_grad_norm=True))
    return Result(steps=seen, points=[validated(strategy, rank, strategy.job.dataset("val"))], warnings=warnings)


def comparison(ranks: list[Result], expected: Plain, rtol: float, *, atol: float) -> Cell:
    """Compare losses, gradient norms, the evaluation and the final weights.

    Args:
        ranks: what each rank saw.
        expected: what a plain loop saw.
        rtol: the tolerance of a loss.
        atol: that of a weight: AdamW makes whole updates from gradients that are nothing but rounding.
    """
    rtol = max(rtol, min(NOISE * expected.noise, MOST))
    difference = largest(losses([rank.steps for rank in ranks]), losses([expected.steps]))
    if not difference <= rtol:
        return Cell(outcome="wrong", detail=f"the losses differ by {difference:.1e}")
    norms = [norm for norm in ranks[0].steps.norms if norm is not None]
    try:
        torch.testing.assert_close(norms, expected.steps.norms, rtol=min(100 * rtol, 0.1), atol=0)
    except AssertionError:
        return Cell(outcome="wrong", detail=f"the gradient norms are {norms}, not {expected.steps.norms}")
    points = [rank.points[0] for rank in ranks]
    found = {"weight": sum(p.weight for p in points), "loss": sum(p.loss_sum for p in points)}
    found |= {key: sum(p.sums.get(key, 0.0) for p in points) for key in expected.evaluation if key not in found}
    if found != pytest.approx(expected.evaluation, rel=10 * rtol):
        return Cell(outcome="wrong", detail=f"the evaluation is {found}, not {expected.evaluation}")
    try:
        weights, wanted = whole_model([rank.steps for rank in ranks]), expected.steps.model
        if weights.keys() != wanted.keys():  # in stages, a module is around the model
            weights = {name.removeprefix("model."): t for name, t in weights.items()}
        torch.testing.assert_close(weights, wanted, rtol=min(100 * rtol, 0.1), atol=max(atol, min(10 * rtol, 1e-2)))
    except AssertionError as e:
        return Cell(outcome="wrong", detail=f"the weights differ: {e}")
    return Cell(outcome="equal", detail=f"{difference:.0e}")


def finite(ranks: list[Result], expected: Plain) -> Cell:
    """Losses and evaluations must be finite, and every sample must be evaluated."""
    points = [rank.points[0] for rank in ranks]
    values = [*losses([rank.steps for rank in ranks]).tolist(), *(p.loss_sum for p in points)]
    if not all(map(math.isfinite, values)):
        return Cell(outcome="wrong", detail=f"not finite: {values}")
    if (weight := sum(p.weight for p in points)) != expected.evaluation["weight"]:
        return Cell(outcome="wrong", detail=f"samples that weigh {weight} are evaluated")
    return Cell(outcome="asynchronous", detail="")


def refusal(answers: list[Answer]) -> Cell:
    """A ValueError in words of ours is a refusal; anything else is a crash."""
    errors = [answer.error.partition(": ") for answer in answers if answer.error]
    if reasons := [text for kind, _, text in errors if kind in ("ValueError", "JobError")]:
        return Cell(outcome="refused", detail=reasons[0])
    first = next((a for a in answers if a.error and "ConnectionError" not in a.error), None)
    return Cell(outcome="crash", detail=(first or next(a for a in answers if a.error)).trace)
