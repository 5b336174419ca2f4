"""Evaluation on a GPU is that of one worker, by every schedule and in slices of any size."""

from __future__ import annotations

import pytest

from helpers.conformance.cases import Case, having
from helpers.conformance.exact_evaluation import assert_evaluated_exactly, assert_scored_exactly, evaluated_in_slices
from helpers.conformance.layouts import LAYOUTS, STAGED
from helpers.jobs.quick_jobs import PredictedDigits, ScoredDigits, digits
from helpers.ranks.gang import Gang
from orchestrator.job import Job


@pytest.mark.parametrize("name", ["ddp-2", "fsdp-2", *STAGED])
def test_every_layout_evaluates_exactly(gang: Gang, name: str) -> None:
    """If it fails, stages wait for each other in an evaluation, or its incomplete last batch counts wrongly."""
    case = Case(job=digits(depth=3, val_size=37), train=having(steps=2, global_batch_size=16))
    assert_evaluated_exactly(gang, case, name, rtol=1e-4)


@pytest.mark.parametrize("job", [ScoredDigits(depth=3, val_size=75), PredictedDigits(depth=3, val_size=75)])
@pytest.mark.parametrize("name", ["ddp-2", "fsdp-2", "1F1B-2"])
def test_metrics_of_the_whole_set_are_those_of_one_worker(gang: Gang, name: str, job: Job) -> None:
    """If it fails, what the ranks have counted on the device is not what one of them gets."""
    assert_scored_exactly(gang, job, LAYOUTS[name], rtol=1e-4)


@pytest.mark.parametrize("name", ["single", "ddp-2", "1F1B-2", "GPipe-2x2"])
def test_an_evaluation_takes_as_few_samples_at_once_as_training(gang: Gang, name: str) -> None:
    """If it fails, an evaluation can run out of memory where training does not."""
    layout = LAYOUTS[name]
    whole = Case(job=digits(depth=3, val_size=45), train=having(global_batch_size=32))
    sliced = layout.of(Case(job=whole.job, train=having(whole.train, grad_accumulation=4)))
    ((rows, expected),) = gang.run(evaluated_in_slices, whole, world_size=1)
    ranks = gang.run(evaluated_in_slices, sliced, world_size=layout.world_size)
    assert rows == 32
    assert {rows for rows, _ in ranks} == {4 if name in ("ddp-2", "GPipe-2x2") else 8}
    assert sum(point.loss_sum for _, point in ranks) == pytest.approx(expected.loss_sum, rel=1e-5)
    assert sum(point.sums.get("accuracy", 0.0) for _, point in ranks) == expected.sums["accuracy"]
