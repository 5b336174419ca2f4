"""What flows between stages, and layers that are hard to part: as on one worker, or refused with the reason."""

import pytest

import helpers.jobs.stage_toys as of
from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import ADAMW, LAYOUTS, assert_as_alone, passes_constants, refuses_constants
from helpers.conformance.training import train
from helpers.jobs.quick_jobs import TinyGPT
from helpers.jobs.stage_toys import Answers, Lengths, NestedBatches
from helpers.jobs.toys import Toy
from helpers.ranks.gang import SOON_S, Gang
from helpers.records.runs import in_campaign

PLAIN, HALVED, SHARED = "1F1B-4", "ZBVZeroBubble-2", "InterleavedZeroBubble-2x2"
"""A stage a worker; backward passes in halves, neighbours on one worker; replicas."""


def case(job, **changes):
    return Case(job=job, train=having(steps=10, global_batch_size=16, **changes))


@pytest.mark.in_turn
@pytest.mark.parametrize("name", [PLAIN, HALVED, "DualPipeV-2"])
@pytest.mark.parametrize(
    "build",
    [pytest.param(of.pairs, marks=passes_constants), of.nested, of.views, *in_campaign(of.skips, of.same_twice)],
)
def test_tensors_of_every_sort_in_any_structure(gang: Gang, build, name: str) -> None:
    assert_as_alone(gang, case(Toy(build=build)), name)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", [PLAIN, HALVED])
@pytest.mark.parametrize(
    "job", [NestedBatches(), NestedBatches(as_dict=False), Answers()], ids=["dict", "tuple", "output"]
)
def test_inputs_targets_and_outputs_of_any_structure(gang: Gang, job, name: str) -> None:
    assert_as_alone(gang, case(job), name)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", [HALVED, PLAIN, *in_campaign(SHARED)])
@pytest.mark.parametrize("build", [of.used_twice, of.frozen_in_between, *in_campaign(of.table_used_twice)])
def test_layers_used_twice_or_frozen(gang: Gang, build, name: str) -> None:
    assert_as_alone(gang, case(Toy(build=build)), name, want_grad_norm=True)


@passes_constants
def test_documents_that_are_kept_apart(gang: Gang) -> None:
    assert_as_alone(gang, case(TinyGPT(layers=3, end_token=ord(" "))), "1F1B-2", rtol=ADAMW)


def test_statistics_used_twice_on_one_worker(gang: Gang) -> None:
    job = Toy(build=of.norm_used_twice)
    assert_as_alone(gang, case(job), "model_parallel-2", split=("head",))


@pytest.mark.parametrize(
    ("job", "name", "split", "said"),
    [
        pytest.param(
            Toy(build=of.norm_used_twice),
            "model_parallel-2",
            ("second",),
            "norm0.num_batches_tracked: forward ",
            id="statistics-twice",
        ),
        pytest.param(
            Toy(build=of.text_between),
            "model_parallel-2",
            ("layer1",),
            "layer layer0 returns str; only tensors in ",
            id="text",
        ),
        pytest.param(
            Lengths(build=of.tied_ends),
            "model_parallel-2",
            ("second",),
            "pad the samples to one length in Job.collate",
            id="lengths",
        ),
        pytest.param(
            Toy(build=of.pairs),
            HALVED,
            "auto",
            "returns a tensor without a gradient, such as a mask, which a stage cannot receive with torch 2.11",
            id="constants",
            marks=refuses_constants,
        ),
    ],
)
def test_what_cannot_be_is_refused_by_every_worker(gang: Gang, job, name: str, split, said: str) -> None:
    layout = LAYOUTS[name]
    answers = gang.ask(train, layout.of(case(job), split=split), world_size=layout.world_size, timeout_s=SOON_S)
    assert any(said in str(a.error) for a in answers), answers[0].trace
    assert all(a.error is not None for a in answers)
