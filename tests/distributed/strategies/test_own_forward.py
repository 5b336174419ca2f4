"""A job that calls its model in a way of its own, in stages: they record that, or it is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.conformance.cases import Case, checked, having
from helpers.conformance.layouts import ADAMW, CONTEXT, LAYOUTS, SGD, STAGED, TENSOR, assert_as_alone, in_turn
from helpers.jobs.forward_jobs import REFUSED, Called, Inner, OfSequential, Tempered
from helpers.ranks.gang import Gang
from helpers.ranks.loops import evaluation, run_loop
from helpers.records.runs import in_campaign
from orchestrator.job import Job

TRAIN = having(steps=6, global_batch_size=32, grad_accumulation=2, clip_norm=0.5)
OTHERS = [name for name in STAGED if name not in ("ZBVZeroBubble-2", "fsdp-1F1B-2x2")]


@pytest.mark.parametrize("name", ["ZBVZeroBubble-2", "fsdp-1F1B-2x2", *in_campaign(*OTHERS)])
def test_stages_call_the_model_as_the_job_does(gang: Gang, name: str) -> None:
    assert_as_alone(gang, Case(job=Called(), train=TRAIN), name, rtol=SGD, plain=True)


@pytest.mark.campaign
@pytest.mark.parametrize("name", sorted(in_turn(STAGED)))
@pytest.mark.parametrize("job", [Called(adamw=True), Inner(), OfSequential()], ids=["AdamW", "parts", "sequential"])
def test_other_calls_and_updates(gang: Gang, job: Job, name: str) -> None:
    rtol = ADAMW if getattr(job, "adamw", False) else SGD
    assert_as_alone(gang, Case(job=job, train=TRAIN), name, rtol=rtol, plain=True)


@pytest.mark.parametrize("name", ["context-in-stages-2x2", *in_campaign("mesh-tensor-in-stages-2x2")])
def test_divided_layers_and_tokens_in_stages(gang: Gang, name: str) -> None:
    train = having(TRAIN, global_batch_size=8)
    assert_as_alone(gang, Case(job=Tempered(), train=train), {**TENSOR, **CONTEXT}[name], rtol=ADAMW)


@pytest.mark.parametrize("name", ["1F1B-2", *in_campaign("fsdp-1F1B-2x2", "ZBVZeroBubble-2", "GPipe-2x2")])
def test_an_evaluation_and_samples_are_those_of_one_worker(gang: Gang, tmp_path: Path, name: str) -> None:
    def ran(of: str) -> tuple[dict[str, float], Any]:
        case = LAYOUTS[of].of(Case(job=Called(), train=having(TRAIN, eval_every=3)))
        world_size = LAYOUTS[of].world_size
        ranks = gang.run(run_loop, case, tmp_path / of, world_size=world_size)
        return evaluation(ranks), float(ranks[0].outcome.texts["sample"])

    (expected, sample), (found, own_sample) = ran("single"), ran(name)
    assert found == pytest.approx(expected, rel=1e-4)
    assert own_sample == pytest.approx(sample, rel=1e-3)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_recording_cannot_follow_is_refused(kind: type[Called]) -> None:
    layout = LAYOUTS["1F1B-2"]
    errors, _ = checked(layout.of(Case(job=kind(), train=replace(TRAIN, grad_accumulation=1))), layout.world_size)
    assert len(errors) == 1
    assert REFUSED[kind] in errors[0]
