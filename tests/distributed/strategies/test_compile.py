"""``train.compile``: the same losses, the same names in checkpoints, and a cost that is counted apart."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from helpers.conformance.cases import DDP, Case, checked, having
from helpers.conformance.layouts import LAYOUTS, SGD, Layout, fsdp_pipeline, layout, pipeline
from helpers.conformance.training import Steps, losses, train
from helpers.jobs.block_jobs import BlockDigits
from helpers.jobs.quick_jobs import QuickDigits, digits
from helpers.jobs.step_toys import Distillation
from helpers.models.zoo_cells import STRATEGIES
from helpers.ranks.gang import Gang, close_gangs
from helpers.ranks.loops import Ran, losses_by_step, run_loop
from helpers.records.runs import in_campaign
from orchestrator.compat.torch import watching_compilation
from orchestrator.job import Job, Split
from orchestrator.protocol.events import FirstStepDone
from orchestrator.protocol.messages import TrainPoint

SECONDS = 300.0
"""For a C++ compiler, which is called a few times, on a busy machine."""

pytestmark = pytest.mark.timeout(900)

COMPILED = having(steps=6, global_batch_size=32, compile=True)


@pytest.fixture(scope="module", autouse=True)
def own_processes() -> Iterator[None]:
    """End the processes with this file: one that has run compiled code counts no FLOPs."""
    yield
    close_gangs()


def compiled(rank: int, case: Case, cache_dir: str) -> tuple[Steps, list[bool]]:
    """What the rank saw, and for each time that something was compiled there, whether that had been compiled before."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache_dir
    compilations: list[bool] = []
    with watching_compilation(compilations.append, lambda: None):
        return train(rank, case), compilations


IN_TWO_BUCKETS = digits(hidden=600, depth=3)
PARAMETER_SERVER = layout(*STRATEGIES["parameter_server sync"])
BUCKETS_OF_1_MB = Layout(options=replace(DDP, bucket_mb=1.0), world_size=2)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("job", "where"),
    [
        pytest.param(IN_TWO_BUCKETS, BUCKETS_OF_1_MB, id="ddp"),
        pytest.param(digits(), PARAMETER_SERVER, id="parameter-server"),
        pytest.param(Distillation(), BUCKETS_OF_1_MB, id="training-step"),
    ],
)
def test_a_compiled_model_has_the_losses_and_the_names_of_the_plain_one(
    gang: Gang, tmp_path_factory: pytest.TempPathFactory, job: Job, where: Layout
) -> None:
    case = where.of(Case(job=job, train=COMPILED))
    cache_dir = str(tmp_path_factory.getbasetemp() / "inductor")
    counted = gang.run(compiled, case, cache_dir, world_size=where.world_size, timeout_s=SECONDS)
    ranks = [seen for seen, _ in counted]
    assert all(compilations for seen, compilations in counted if seen.model), "a server has no model"
    assert not any(again for _, compilations in counted for again in compilations), "each model has a limit of its own"
    plain = gang.run(train, replace(case, train=having(COMPILED, compile=False)), world_size=where.world_size)
    torch.testing.assert_close(losses(ranks), losses(plain), rtol=10 * SGD, atol=0)
    assert [rank.model.keys() for rank in ranks] == [rank.model.keys() for rank in plain]


BLOCKS = BlockDigits(hidden=24, listed=True, dropout=0.0)
BLOCKS_IN_BOTH = layout(pipeline("1F1B", 4, split=("blocks.1",)), 2)
PARTS_IN_BOTH = layout(replace(fsdp_pipeline("1F1B", 2, reshard=True), split=("blocks.1",)), 4)
"""By names: measured times could cut two runs at different places."""


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("where", "changes"),
    [
        (LAYOUTS["single"], {"compile": "blocks", "activation_checkpointing": "blocks"}),
        (BUCKETS_OF_1_MB, {"compile": True, "activation_checkpointing": "blocks"}),
        (BLOCKS_IN_BOTH, {"compile": "blocks"}),
        (LAYOUTS["fsdp-2"], {"compile": "blocks"}),
        (PARTS_IN_BOTH, {"compile": "blocks"}),
        (LAYOUTS["hsdp-2x2"], {"compile": True, "activation_checkpointing": "blocks"}),
    ],
    ids=["recomputed", "ddp-recomputed", "pipeline", "fsdp", "fsdp-pipeline", "hsdp-recomputed"],
)
def test_compiled_blocks_have_the_losses_of_plain_ones_and_share_their_code(
    gang: Gang, tmp_path_factory: pytest.TempPathFactory, where: Layout, changes: dict[str, Any]
) -> None:
    plain = where.of(Case(job=BLOCKS, train=having(COMPILED, compile=False, grad_accumulation=2)))
    case = replace(plain, train=having(plain.train, **changes))
    cache_dir = str(tmp_path_factory.getbasetemp() / "inductor")
    counted = gang.run(compiled, case, cache_dir, world_size=where.world_size, timeout_s=SECONDS)
    counts = [len(compilations) for _, compilations in counted]
    assert max(counts) == 2, "one forward and one backward pass"
    assert min(counts) >= 1, "both at once, if another rank has put them into the cache"
    ranks, expected = [seen for seen, _ in counted], gang.run(train, plain, world_size=where.world_size)
    torch.testing.assert_close(losses(ranks), losses(expected), rtol=10 * SGD, atol=0)
    for rank, other in zip(ranks, expected, strict=True):
        torch.testing.assert_close(rank.model, other.model, rtol=1e-3, atol=1e-4)  # running statistics included


def compiled_loop(rank: int, case: Case, run_dir: str, cache_dir: str) -> Ran:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache_dir
    torch.compiler.reset()
    return run_loop(rank, case, run_dir)


def assert_all_flops_counted(ran: Ran, job: Job) -> None:
    """Those of a step of the plain model, by torch's own counter."""
    inputs, target = torch.ones(32, 64), torch.zeros(32, dtype=torch.long)
    with FlopCounterMode(display=False) as expected:
        F.cross_entropy(job.model()(inputs), target).backward()
    counts = [point.flops for point in ran.points if isinstance(point, TrainPoint)]
    assert counts[-1] == expected.get_total_flops()


class Unvalidated(QuickDigits):
    def dataset(self, split: Split) -> Any:
        return super().dataset(split) if split == "train" else None


@pytest.mark.parametrize(
    ("job", "compiled_again"),
    [
        (Unvalidated(hidden=24), 0),
        # For a batch of the size of a training step, and for the last one.
        *in_campaign((digits(), 2)),
    ],
    ids=["trained", "evaluated"],
)
def test_compiled_code_has_equal_losses_and_all_flops_counted_and_its_compilation_is_no_time_of_a_step(
    gang: Gang, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, job: Job, compiled_again: int
) -> None:
    case = Case(job=job, train=having(COMPILED, steps=4, eval_every=2))
    cache_dir = str(tmp_path_factory.getbasetemp() / "inductor")
    (ran,) = gang.run(compiled_loop, case, str(tmp_path), cache_dir, world_size=1, timeout_s=SECONDS)
    points = [point for point in ran.points if isinstance(point, TrainPoint)]
    assert [len(point.step_ms) for point in points] == [0, 0, 1, 1], "the first step compiles, the second counts"
    seconds = [point.metrics["perf/compile_s"].value for point in points]
    again = [point.metrics["perf/recompiles"].value for point in points]
    assert 0 < seconds[0] <= seconds[1] == seconds[2] == seconds[3]
    assert (seconds[0] < seconds[1]) == bool(compiled_again), "the trial of an evaluation compiles it again"
    assert again == [0, *[compiled_again] * 3]
    (first_step,) = [event for event in ran.events if isinstance(event, FirstStepDone)]
    assert first_step.startup["compile_s"] == pytest.approx(seconds[0])
    assert first_step.startup["first_step_s"] > 0
    plain = replace(case, train=having(case.train, compile=False))
    expected = losses_by_step(gang.run(run_loop, plain, tmp_path / "plain", world_size=1))
    assert losses_by_step([ran]) == pytest.approx(expected, rel=10 * SGD)
    assert_all_flops_counted(ran, case.job)


@pytest.mark.campaign
def test_the_flops_of_compiled_blocks_that_are_computed_again_are_those_of_plain_ones(
    gang: Gang, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"compile": "blocks", "activation_checkpointing": "blocks"}
    case = Case(job=BLOCKS, train=having(COMPILED, steps=2, grad_accumulation=2, **changes))
    cache_dir = str(tmp_path_factory.getbasetemp() / "inductor")
    (ran,) = gang.run(compiled_loop, case, str(tmp_path), cache_dir, world_size=1, timeout_s=SECONDS)
    assert_all_flops_counted(ran, BLOCKS)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("dp", "train.compile=true: strategy=dp: it copies the model in every step"),
        ("pipeline", "train.compile=true: strategy=pipeline: ZBVZeroBubble computes backward passes in halves"),
        (
            "fsdp",
            "train.compile=true: strategy=fsdp gathers parameters between the blocks of the model; set it to blocks",
        ),
        (
            "fsdp_pipeline",
            "train.compile=true: strategy=fsdp_pipeline gathers parameters between the blocks of the model; set it to",
        ),
        ("ddp", "strategy.bucket_mb=0.001: torch.compile cuts the backward pass at the buckets"),
    ],
)
def test_what_cannot_be_compiled_is_refused(strategy: str, reason: str) -> None:
    of_strategy = {**STRATEGIES, "ddp": (DDP, 2), "pipeline": (pipeline("ZBVZeroBubble", 4), 2)}
    options, world_size = of_strategy[strategy]
    errors, _ = checked(Case(job=digits(depth=4), train=COMPILED, options=options, alone=options), world_size)
    assert [error for error in errors if error.startswith(reason)]
