"""Training a model in stages beyond what the conformance matrix has: shared, frozen, random and sparse parameters, and
its evaluation."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import helpers.jobs.stage_toys as of
from helpers.conformance.cases import Case, having
from helpers.conformance.exact_evaluation import assert_evaluated_exactly
from helpers.conformance.layouts import ADAMW, LAYOUTS, SGD, assert_as_alone, passes_constants, whole_model
from helpers.conformance.training import losses, piece, train
from helpers.jobs.quick_jobs import digits
from helpers.jobs.toys import Tokens, Toy
from helpers.ranks.gang import Gang
from helpers.records.runs import in_campaign
from jobs.sparse import MatrixCompletion
from orchestrator.strategies.update.gradients import norm_over

PLAIN, HALVED, SHARED = "1F1B-4", "ZBVZeroBubble-2", "InterleavedZeroBubble-2x2"
"""A stage a worker; backward passes in halves, neighbours on one worker; replicas."""
EACH = [PLAIN, HALVED, SHARED]


def case(job: Toy, **changes: object) -> Case:
    return Case(job=job, train=having(**{"steps": 10, "global_batch_size": 16, **changes}))


def norm_of_mixed(rank: int) -> tuple[float, torch.dtype]:
    gradients = [[torch.full((9,), 200.0, dtype=torch.float16)], [torch.full((16,), 200.0).double()], []][rank]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    norm = norm_over(dist.group.WORLD, parameters, torch.device("cpu"))
    return float(norm), norm.dtype


def test_stages_of_other_types_and_one_without_gradients_have_one_norm(gang: Gang) -> None:
    assert gang.run(norm_of_mixed, world_size=3) == [(1000.0, torch.float32)] * 3


# Parameters that several stages have, or that are not trained -------------------------------------


@pytest.mark.in_turn
@pytest.mark.parametrize("name", [SHARED, HALVED, *in_campaign("1F1B-2x2-replicas-close")])
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(Toy(build=of.tied_thrice), id="thrice"),
        pytest.param(Tokens(build=of.tied_and_frozen), id="frozen", marks=passes_constants),
    ],
)
def test_tied_weights(gang: Gang, job: Toy, name: str) -> None:
    assert_as_alone(gang, case(job, steps=8), name, want_grad_norm=True)


def frozen_in_the_middle() -> torch.nn.Module:
    return of.frozen("second")


def frozen_last() -> torch.nn.Module:
    return of.frozen("head")


def frozen_body() -> torch.nn.Module:
    return of.frozen("first", "second", "third")


@pytest.mark.in_turn
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize(
    "build", [frozen_in_the_middle, frozen_last, pytest.param(frozen_body, marks=passes_constants)]
)
def test_frozen_stages(gang: Gang, build, name: str) -> None:
    stages = ("second", "third", "head")
    assert_as_alone(gang, case(Toy(build=build)), name, split=stages, want_grad_norm=True)


@passes_constants
def test_a_frozen_stage_is_continued(gang: Gang) -> None:
    job = case(of.ScheduledChain(build=of.frozen_first), steps=6)
    layout = LAYOUTS[PLAIN]
    ((_, end),) = gang.run(piece, job, None, 6, world_size=1)
    begun = gang.run(piece, layout.of(job), None, 3, world_size=layout.world_size)[0][1]
    _, continued = gang.run(piece, layout.of(job), begun, 6, world_size=layout.world_size)[0]
    torch.testing.assert_close(continued.model, end.model, rtol=100 * ADAMW, atol=10 * ADAMW)
    assert continued.optimizer.keys() == end.optimizer.keys()
    assert continued.meta == end.meta


# Gradients that schedules with halved backward passes may miss, and sparse ones -------------------


@pytest.mark.parametrize("name", EACH)
def test_what_parameters_make_without_the_input(gang: Gang, name: str) -> None:
    assert_as_alone(gang, case(Toy(build=of.beside)), name, split=("beside", "second", "head"))


@pytest.mark.in_turn
@pytest.mark.parametrize("name", [PLAIN, "GPipe-2x2"])
@pytest.mark.parametrize("build", [of.sparse_ends, of.sparse_and_tied])
def test_sparse_gradients_are_summed_and_clipped(gang: Gang, build, name: str) -> None:
    assert_as_alone(gang, case(Tokens(build=build, momentum=0), clip_norm=0.1), name)


@passes_constants
@pytest.mark.parametrize("name", ["model_parallel-2", "GPipe-2x2"])
def test_sparse_gradients_of_a_recorded_model(gang: Gang, name: str) -> None:
    job = MatrixCompletion(size=40, rank=3, observed=600, lr=0.1)
    assert_as_alone(gang, case(job, global_batch_size=100), name)


# Evaluation, statistics and randomness ------------------------------------------------------------


@pytest.mark.in_turn
@pytest.mark.parametrize("name", [HALVED, "1F1B-2x2-replicas-close"])
@pytest.mark.parametrize(
    "job",
    [
        digits(depth=3, val_size=37),
        Tokens(build=of.tied_ends, samples=38, empty=3),
        of.NestedBatches(samples=21),
        of.Answers(samples=5),
    ],
    ids=["last-batch-uneven", "weights", "nested", "fewer-than-a-batch"],
)
def test_evaluation_is_exact(gang: Gang, job: Toy, name: str) -> None:
    assert_evaluated_exactly(gang, case(job, steps=2), name)


@pytest.mark.parametrize("name", [HALVED, *in_campaign(*(name for name in EACH if name != HALVED))])
def test_dropout(gang: Gang, name: str) -> None:
    dropping = case(Toy(build=of.dropped, lr=0.02), steps=30)
    ranks, _ = assert_evaluated_exactly(gang, dropping, name)
    curve = losses(ranks)
    assert curve[-5:].mean() < 0.9 * curve[:5].mean(), "nothing was learned"


@pytest.mark.parametrize("name", [PLAIN, *in_campaign(*(name for name in EACH if name != PLAIN))])
def test_the_same_seed_and_cut_drop_the_same(gang: Gang, name: str) -> None:
    layout = LAYOUTS[name]
    cut = layout.of(case(Toy(build=of.dropped), steps=3), split=("second", "third", "head"))
    first, again = (gang.run(train, cut, world_size=layout.world_size) for _ in range(2))
    assert torch.equal(losses(first), losses(again))
    other = gang.run(train, replace(cut, seed=4), world_size=layout.world_size)
    assert not torch.equal(losses(other), losses(first))


@pytest.mark.parametrize("build", [of.normed, *in_campaign(of.averaging)])
def test_running_statistics_of_micro_batches_are_those_of_slices(gang: Gang, build) -> None:
    """What a stage sees is the same as with accumulation on one worker, in the same order."""
    slices = case(Toy(build=build), grad_accumulation=4)
    (alone,) = gang.run(train, slices, world_size=1)
    whole = case(Toy(build=build))
    for name in (PLAIN, "Interleaved1F1B-2", HALVED):
        layout = LAYOUTS[name]
        ranks = gang.run(train, layout.of(whole), world_size=layout.world_size)
        torch.testing.assert_close(losses(ranks), losses([alone]), rtol=SGD, atol=0)
        torch.testing.assert_close(whole_model(ranks), alone.model, rtol=100 * SGD, atol=10 * SGD)
    (undivided,) = gang.run(train, whole, world_size=1)
    assert (losses([undivided]) - losses([alone])).abs().max() > 1e-3, "the statistics make no difference"


@pytest.mark.in_turn
@pytest.mark.parametrize("build", [of.normed, of.averaging])
@pytest.mark.parametrize("name", [SHARED, PLAIN])
def test_running_statistics_are_equal_on_replicas_and_used_in_evaluation(gang: Gang, build, name: str) -> None:
    ranks, state = assert_evaluated_exactly(gang, case(Toy(build=build), steps=5), name)
    fresh = build().state_dict()
    assert whole_model(ranks).keys() == state.model.keys() == fresh.keys()
    kept = [n for n in fresh if n.endswith(("running_mean", "average"))]
    assert kept
    assert all(not torch.equal(state.model[n], fresh[n]) for n in kept)
