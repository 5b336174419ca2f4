"""Before the first step, what the ranks compute is compared with the whole model, and nothing of that is left."""

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import CONTEXT, LAYOUTS, MODEL_PARALLEL, SEQUENCE, TENSOR, pipeline
from helpers.conformance.training import assert_same, make, train
from helpers.files.golden import Golden
from helpers.jobs import ranked_jobs as of
from helpers.jobs import unrecorded
from helpers.jobs.quick_jobs import TinyGPT
from helpers.jobs.toys import Toy
from helpers.models.rarer_tricks import logits_of_an_early_block_too
from helpers.models.tricks import Tricky
from helpers.ranks.gang import Gang
from helpers.ranks.loops import Ran, run_loop
from helpers.records.runs import in_campaign
from orchestrator.config.schema import StrategyConfig
from orchestrator.job import Job
from orchestrator.strategies.trainer import Trainer
from orchestrator.strategies.whole_check import compare_with_whole

STAGES = replace(MODEL_PARALLEL, split=("3",))
DDP, FSDP = LAYOUTS["ddp-2"].options, LAYOUTS["fsdp-2"].options
SYNCHRONIZED = replace(DDP, sync_batchnorm=True)


def notes(rank: int, case: Case, most_bytes: int | None = None, looks: int = 10**9) -> tuple[str, ...]:
    """What was not compared; ``looks``: how often it is asked before the run stops."""
    strategy = make(replace(case, train=replace(case.train, check="never")), rank)
    assert isinstance(strategy, Trainer)
    train_set = case.job.dataset("train")
    asked = itertools.count()
    return compare_with_whole(
        strategy, train_set, known=lambda model: False, is_cut=lambda: next(asked) >= looks, most_bytes=most_bytes
    ).notes


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
    """Alike whether the first worker has room for the whole model or for no parameter beside the one in use."""
    golden.says(refusal(gang, case_of(of.Ranked(kind=kind), options)))


def refusal(gang: Gang, case: Case) -> str:
    texts = []
    for most_bytes in (None, 0):
        answers = gang.ask(notes, case, most_bytes, world_size=2)
        texts.append(next(a.error for a in answers if a.error is not None and a.error.startswith("JobError")))
    assert texts[0] == texts[1]
    return texts[0]


@pytest.mark.parametrize(
    ("job", "split"),
    [
        (Toy(build=unrecorded.CustomFunctionInGlue), "third"),
        (Toy(build=unrecorded.CountsInGlue), "third"),
        (Toy(build=unrecorded.PreparesALayer), "third"),
        (Toy(build=unrecorded.EvaluatesOtherwise), "third"),
        (Toy(build=unrecorded.ChangesItsPrecision), "2"),
        (Toy(build=unrecorded.Reaches), "third"),
        (unrecorded.HandCut(build=unrecorded.Plain), "auto"),
    ],
    ids=lambda value: value.build.__name__ if isinstance(value, Toy) else value,
)
def test_stages_that_miss_something_are_refused(gang: Gang, golden: Golden, job: Job, split: str) -> None:
    options = replace(MODEL_PARALLEL, split=split if split == "auto" else (split,))
    golden.says(refusal(gang, case_of(job, options)))


GPT = TinyGPT(layers=2, variant="llama", kv_heads=2, tied=True, vocabulary=257)


@pytest.mark.parametrize(
    ("layout", "job"),
    [
        ("sharded-ddp-3", of.Ranked(kind=of.Busy)),
        ("hsdp-2x2", of.Ranked(kind=of.Busy)),
        ("fsdp-ZBVZeroBubble-2x2", of.Ranked(kind=of.Busy)),
        ("mesh-tensor-2", GPT),
        *in_campaign(
            ("ddp-2", GPT),
            ("fsdp-3", GPT),
            ("mesh-hsdp-in-stages-2x2x2", GPT),
            ("mesh-replicated-tensor-2x2", GPT),
            ("mesh-sharded-tensor-2x2", GPT),
            ("mesh-tensor-in-stages-2x2", GPT),
            ("mesh-zero1-tensor-2x2", GPT),
            ("mesh-sequence-2", GPT),
            ("mesh-context-tensor-2x2", replace(GPT, vocabulary=256)),
            ("mesh-zero1-context-2", replace(GPT, vocabulary=256)),
        ),
    ],
)
def test_a_model_without_room_on_one_worker_is_compared(gang: Gang, layout: str, job: Job) -> None:
    of_layout = {**LAYOUTS, **TENSOR, **SEQUENCE, **CONTEXT}[layout]
    case = of_layout.of(case_of(job, DDP, activation_checkpointing="blocks" if job is GPT else "none"))
    assert not any(gang.run(notes, case, 0, world_size=of_layout.world_size))


def test_a_weight_that_forward_changes_needs_room_for_all(gang: Gang, golden: Golden) -> None:
    case = case_of(of.Ranked(kind=of.Limited), DDP)
    assert gang.run(notes, case, world_size=2) == [(), ()]
    (note,), second = gang.run(notes, case, 0, world_size=2)
    golden.says(note)
    assert not second


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


@pytest.mark.parametrize(("most_bytes", "looks"), [(None, 0), (0, 3), (None, 5)])
def test_a_stop_ends_a_comparison(gang: Gang, golden: Golden, most_bytes: int | None, looks: int) -> None:
    """Before the passes of the whole model, within them, and where it is measured what rounding does."""
    (note,), second = gang.run(notes, case_of(of.Ranked(kind=of.Scaled), DDP), most_bytes, looks, world_size=2)
    golden.says(note)
    assert not second


def test_what_random_numbers_change_is_not_compared(gang: Gang, golden: Golden) -> None:
    assert gang.run(notes, case_of(of.Ranked(kind=of.Busy), FSDP), world_size=2) == [(), ()]
    (note,), second = gang.run(notes, case_of(of.Ranked(kind=of.Drawing), FSDP), world_size=2)
    golden.says(note)
    assert not second


def test_a_model_that_computes_in_16_bits_inside_may_differ_by_their_rounding(gang: Gang) -> None:
    assert gang.run(notes, case_of(of.Ranked(kind=of.ScaledIn16Bits), DDP), world_size=2) == [(), ()]


@pytest.mark.campaign
def test_divided_logits_pass_through_a_stage_of_the_same_worker(gang: Gang) -> None:
    options = replace(pipeline("ZBVZeroBubble", 2), tensor=2)
    case = case_of(Tricky(trick=logits_of_an_early_block_too.__name__.replace("_", " ")), options, global_batch_size=8)
    assert gang.run(notes, case, world_size=4) == [()] * 4


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
        answers = gang.ask(with_tricks, tricks, str(tmp_path), case, tmp_path / "run", world_size=2)
        assert all(a.error is None or "JobError" in a.error or "onnection" in a.error for a in answers), answers
        return all(a.error is None for a in answers)

    assert not runs("yes")
    assert not runs("yes")
    assert runs("")
    assert runs("yes")
    assert not runs("yes", global_batch_size=32)
    assert not runs("yes", check="always")
    assert runs("yes", check="never", global_batch_size=32)
