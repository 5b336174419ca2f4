"""Before the first step, what the ranks compute is compared with the whole model, and nothing of that is left."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import LAYOUTS, MODEL_PARALLEL
from helpers.conformance.training import assert_same, make, train
from helpers.files.golden import Golden
from helpers.jobs import ranked_jobs as of
from helpers.ranks.gang import Gang
from helpers.ranks.loops import Ran, run_loop
from orchestrator.config.schema import StrategyConfig
from orchestrator.job import Job

STAGES = replace(MODEL_PARALLEL, split=("3",))
DDP, FSDP = LAYOUTS["ddp-2"].options, LAYOUTS["fsdp-2"].options
SYNCHRONIZED = replace(DDP, sync_batchnorm=True)


def case_of(job: Job, options: StrategyConfig, **changes: Any) -> Case:
    return Case(job=job, options=options, train=having(**{"steps": 3, "global_batch_size": 16, **changes}))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (of.Scaled, DDP),
        (of.Scaled, FSDP),
        (of.ScaledInEvaluation, FSDP),
        (of.ScaledInEvaluation, STAGES),
        (of.PartlyDetached, DDP),
        (of.ScaledAfterNorm, SYNCHRONIZED),
        (of.Counting, STAGES),
        (of.Failing, FSDP),
    ],
    ids=lambda value: value.name if isinstance(value, StrategyConfig) else value.__name__,
)
def test_another_model_is_refused(gang: Gang, golden: Golden, kind: Any, options: StrategyConfig) -> None:
    answers = gang.ask(train, case_of(of.Ranked(kind=kind), options), world_size=2)
    golden.says(next(a.error for a in answers if a.error is not None and a.error.startswith("JobError")))


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("ddp-4", of.Limited),
        ("sharded-ddp-3", of.Limited),
        ("hsdp-2x2", of.Busy),
        ("1F1B-2x2", of.Busy),
        ("fsdp-ZBVZeroBubble-2x2", of.Busy),
    ],
)
def test_a_comparison_leaves_no_trace(gang: Gang, layout: str, kind: Any) -> None:
    """The sums of training see the model, the generators and themselves as if there had been none."""
    of_layout = LAYOUTS[layout]
    cases = [of_layout.of(case_of(of.Ranked(kind=kind), DDP, check=check)) for check in ("always", "never")]
    compared, alone = (gang.run(train, case, True, world_size=of_layout.world_size) for case in cases)
    for one, other in zip(compared, alone, strict=True):
        assert one.loss_sums == other.loss_sums
        assert one.norms == other.norms
        assert_same(one.model, other.model)


def notes(rank: int, case: Case) -> tuple[str, ...]:
    strategy = make(replace(case, train=replace(case.train, check="never")), rank)
    return strategy.compare_with_whole(case.job.dataset("train"), known=lambda model: False).notes


def test_what_random_numbers_change_is_not_compared(gang: Gang, golden: Golden) -> None:
    assert gang.run(notes, case_of(of.Ranked(kind=of.Busy), FSDP), world_size=2) == [(), ()]
    (note,), second = gang.run(notes, case_of(of.Ranked(kind=of.Drawing), FSDP), world_size=2)
    golden.says(note)
    assert not second


@pytest.mark.parametrize("world_size", [2, 3])
def test_statistics_of_all_samples_are_compared(gang: Gang, world_size: int) -> None:
    case = case_of(of.Ranked(kind=of.Normed), SYNCHRONIZED)
    assert gang.run(notes, case, world_size=world_size) == [()] * world_size


def with_tricks(rank: int, tricks: str, cache: str, *run: Any) -> Ran:
    os.environ[of.TRICKS], os.environ["XDG_CACHE_HOME"] = tricks, cache
    try:
        return run_loop(rank, *run)
    finally:
        del os.environ[of.TRICKS], os.environ["XDG_CACHE_HOME"]


def test_a_comparison_is_made_once(gang: Gang, tmp_path: Path) -> None:
    """What is wrong in a comparison is not remembered, and what is wrong after one is not seen."""

    def runs(tricks: str, **changes: Any) -> bool:
        case = case_of(of.Ranked(kind=of.Sometimes), DDP, **{"check": "auto", **changes})
        arguments = (str(tmp_path), case, 2, str(tmp_path / "run"), None, 0)
        answers = gang.ask(with_tricks, tricks, *arguments, world_size=2)
        assert all(a.error is None or "JobError" in a.error or "onnection" in a.error for a in answers), answers
        return all(a.error is None for a in answers)

    assert not runs("yes")
    assert not runs("yes")
    assert runs("")
    assert runs("yes")
    assert not runs("yes", global_batch_size=32)
    assert not runs("yes", check="always")
    assert runs("yes", check="never", global_batch_size=32)
