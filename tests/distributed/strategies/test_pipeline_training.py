"""Training a model in stages beyond what the conformance matrix has: shared, frozen, random and sparse parameters, what
flows between stages, and the evaluation; or a refusal with the reason."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import helpers.jobs.stage_toys as of
from helpers.conformance.cases import Case, having
from helpers.conformance.exact_evaluation import assert_evaluated_exactly
from helpers.conformance.layouts import (
    ADAMW,
    LAYOUTS,
    SGD,
    assert_as_alone,
    passes_constants,
    refuses_constants,
    rows_in_turn,
    whole_model,
)
from helpers.conformance.training import losses, piece, train
from helpers.jobs.quick_jobs import TinyGPT, digits
from helpers.jobs.toys import Tokens, Toy
from helpers.ranks.gang import SOON_S, Gang
from helpers.records.runs import in_campaign
from jobs.sparse import MatrixCompletion
from orchestrator.job import Job
from orchestrator.strategies.update.gradients import norm_over

PLAIN, HALVED, SHARED = "1F1B-4", "ZBVZeroBubble-2", "InterleavedZeroBubble-2x2"
"""A stage a worker; backward passes in halves, neighbours on one worker; replicas."""
EACH = [PLAIN, HALVED, SHARED]


def case(job: Job, **changes: object) -> Case:
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


# As one worker alone ------------------------------------------------------------------------------


def constants(job: Job) -> Any:
    """A job in which a stage receives a tensor without a gradient."""
    return pytest.param(job, marks=passes_constants)


def frozen(*layers: str) -> Toy:
    return Toy(build=functools.partial(of.frozen, *layers))


NORMS, ENDS = {"want_grad_norm": True}, ("second", "third", "head")
COMPLETION = MatrixCompletion(size=40, rank=3, observed=600, lr=0.1)
ROWS = [
    # Parameters that several stages have, that are used twice, or that are not trained.
    *rows_in_turn(
        {"tied thrice": Toy(build=of.tied_thrice), "tied and frozen": constants(Tokens(build=of.tied_and_frozen))},
        [SHARED, HALVED, *in_campaign("1F1B-2x2-replicas-close")],
        NORMS,
        steps=8,
    ),
    *rows_in_turn(
        {
            "frozen in the middle": frozen("second"),
            "frozen last": frozen("head"),
            "frozen body": constants(frozen("first", "second", "third")),
        },
        EACH,
        {**NORMS, "split": ENDS},
    ),
    *rows_in_turn(
        {
            "used twice": Toy(build=of.used_twice),
            "frozen in between": Toy(build=of.frozen_in_between),
            "table used twice": in_campaign(Toy(build=of.table_used_twice))[0],
        },
        [HALVED, PLAIN, *in_campaign(SHARED)],
        NORMS,
    ),
    *rows_in_turn({"statistics used twice": Toy(build=of.norm_used_twice)}, ["model_parallel-2"], {"split": ("head",)}),
    # Gradients that schedules with halved backward passes may miss, and sparse ones, which are summed and clipped.
    *rows_in_turn({"made without the input": Toy(build=of.beside)}, EACH, {"split": ("beside", *ENDS[::2])}),
    *rows_in_turn(
        {
            "sparse ends": Tokens(build=of.sparse_ends, momentum=0),
            "sparse and tied": Tokens(build=of.sparse_and_tied, momentum=0),
        },
        [PLAIN, "GPipe-2x2"],
        clip_norm=0.1,
    ),
    *rows_in_turn(
        {"sparse, recorded": constants(COMPLETION)}, ["model_parallel-2", "GPipe-2x2"], global_batch_size=100
    ),
    # What flows between stages.
    *rows_in_turn(
        {
            "pairs": constants(Toy(build=of.pairs)),
            "nested": Toy(build=of.nested),
            "views": Toy(build=of.views),
            "skips": in_campaign(Toy(build=of.skips))[0],
            "same twice": in_campaign(Toy(build=of.same_twice))[0],
        },
        [PLAIN, HALVED, "DualPipeV-2"],
    ),
    *rows_in_turn(
        {"dict": of.NestedBatches(), "tuple": of.NestedBatches(as_dict=False), "output": of.Answers()}, [PLAIN, HALVED]
    ),
    *rows_in_turn({"documents apart": constants(TinyGPT(layers=3, end_token=ord(" ")))}, ["1F1B-2"], {"rtol": ADAMW}),
]


@pytest.mark.parametrize(("job", "name", "train", "keys"), ROWS)
def test_stages_train_as_one_worker_alone(
    gang: Gang, job: Job, name: str, train: dict[str, Any], keys: dict[str, Any]
) -> None:
    assert_as_alone(gang, case(job, **train), name, **keys)


@pytest.mark.parametrize(
    ("build", "name", "split", "said"),
    [
        (of.norm_used_twice, "model_parallel-2", ("second",), "norm0.num_batches_tracked: forward "),
        (of.text_between, "model_parallel-2", ("layer1",), "layer layer0 returns str; only tensors in "),
        (of.tied_ends, "model_parallel-2", ("second",), "pad the samples to one length in Job.collate"),
        pytest.param(
            of.pairs,
            HALVED,
            "auto",
            "returns a tensor without a gradient, such as a mask, which a stage cannot receive with torch 2.11",
            marks=refuses_constants,
        ),
    ],
    ids=["statistics twice", "text", "lengths", "constants"],
)
def test_what_cannot_be_is_refused_by_every_worker(
    gang: Gang, build: Callable[[], nn.Module], name: str, split: Any, said: str
) -> None:
    layout, kind = LAYOUTS[name], of.Lengths if build is of.tied_ends else Toy
    cut = layout.of(case(kind(build=build)), split=split)
    answers = gang.ask(train, cut, world_size=layout.world_size, timeout_s=SOON_S)
    assert any(said in str(a.error) for a in answers), answers[0].trace
    assert all(a.error is not None for a in answers)


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
