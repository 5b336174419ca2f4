"""What the plan says of strategies that cut the model: stages, micro-batches, and all that cannot be."""

from __future__ import annotations

import pytest

from helpers.machines.plans import GPU_BOX, LAPTOP, errors_of, plan_of
from orchestrator.planning.plan import Plan


def plan(*words: str) -> Plan:
    return plan_of(LAPTOP, *words, embedded=True)


def errors(*words: str) -> tuple[str, ...]:
    return errors_of(LAPTOP, *words, embedded=True)


def stages(of: Plan) -> list[tuple[int, ...]]:
    return [w.stages for w in of.workers]


# Who gets what ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["model_parallel", "pipeline"])
@pytest.mark.parametrize("workers", [2, 4])
def test_each_worker_of_a_chain_has_a_stage_and_the_whole_batch(strategy: str, workers: int) -> None:
    found = plan(f"strategy={strategy}", f"strategy.num_workers={workers}")
    assert stages(found) == [(stage,) for stage in range(workers)]
    assert [(w.dp_rank, w.pp_rank, w.samples_per_step) for w in found.workers] == [(0, r, 64) for r in range(workers)]


def test_the_naive_split_is_one_microbatch() -> None:
    layout = plan("strategy=model_parallel").pipeline
    assert layout is not None
    assert (layout.schedule, layout.num_stages, layout.num_microbatches) == ("GPipe", 2, 1)


@pytest.mark.parametrize(
    ("schedule", "per_rank", "expected"),
    [
        ("1F1B", "auto", [(0,), (1,)]),
        ("Interleaved1F1B", "auto", [(0, 2), (1, 3)]),
        ("LoopedBFS", "3", [(0, 2, 4), (1, 3, 5)]),
        ("ZBVZeroBubble", "2", [(0, 3), (1, 2)]),
    ],
)
def test_a_schedule_places_its_stages(schedule: str, per_rank: str, expected: list[tuple[int, ...]]) -> None:
    found = plan("strategy=pipeline", f"strategy.schedule={schedule}", f"strategy.stages_per_rank={per_rank}")
    assert stages(found) == expected


@pytest.mark.parametrize(
    ("close", "expected"),
    [
        ("stages", [(0, (0,)), (0, (1,)), (1, (0,)), (1, (1,)), (2, (0,)), (2, (1,))]),
        ("replicas", [(0, (0,)), (1, (0,)), (2, (0,)), (0, (1,)), (1, (1,)), (2, (1,))]),
    ],
)
def test_neighbours_in_the_grid_and_why(close: str, expected: list[tuple[int, tuple[int, ...]]]) -> None:
    found = plan(
        "strategy=ddp_pipeline", "strategy.num_workers=6", f"strategy.close={close}", "train.global_batch_size=48"
    )
    assert [(w.dp_rank, w.stages) for w in found.workers] == expected
    assert {w.samples_per_step for w in found.workers} == {16}
    (note,) = [n for n in found.notes if n.startswith("placement: ")]
    assert ("the stages of a pipeline" if close == "stages" else "the replicas of a stage") in note


def test_auto_makes_two_replicas_on_cpus_and_takes_every_gpu() -> None:
    assert plan("strategy=ddp_pipeline").mesh.data_parallel_size == 2
    three = plan("strategy=ddp_pipeline", "strategy.pipeline_parallel_size=3", "train.global_batch_size=60")
    assert (three.world_size, three.mesh.data_parallel_size) == (6, 2)
    gpus = plan_of(GPU_BOX, "strategy=ddp_pipeline")
    assert (gpus.world_size, gpus.mesh.data_parallel_size) == (4, 2)


@pytest.mark.parametrize(("batch", "expected"), [(64, 4), (60, 4), (7, 7), (6, 6), (9, 9), (2, 2)])
def test_auto_means_about_two_microbatches_a_stage(batch: int, expected: int) -> None:
    layout = plan("strategy=pipeline", f"train.global_batch_size={batch}").pipeline
    assert layout is not None
    assert layout.num_microbatches == expected


def test_replicas_may_have_uneven_shares_where_one_microbatch_is_legal() -> None:
    found = plan("strategy=ddp_pipeline", "strategy.schedule=GPipe", "train.global_batch_size=65")
    assert [w.samples_per_step for w in found.workers] == [33, 33, 32, 32]
    assert any("shares of the batch differ (33 and 32 samples)" in n for n in found.notes)


# What cannot be -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "strategy=pipeline strategy.num_workers=1",
            ["strategy.num_workers=1: strategy=pipeline needs at least 2, one per stage; use strategy=single for one"],
        ),
        ("strategy=model_parallel strategy.num_workers=1", ["strategy.num_workers=1: strategy=model_parallel needs"]),
        (
            "strategy=ddp_pipeline strategy.num_workers=5 strategy.pipeline_parallel_size=4",
            ["strategy.num_workers=5: not divisible by strategy.pipeline_parallel_size=4; set it to 4 or 8"],
        ),
        (
            "strategy=ddp_pipeline strategy.num_workers=2 strategy.pipeline_parallel_size=3",
            ["strategy.num_workers=2: not divisible by strategy.pipeline_parallel_size=3; set it to 3"],
        ),
        (
            "strategy=pipeline strategy.num_workers=4 strategy.num_microbatches=2",
            ["strategy.num_microbatches=2: 1F1B needs at least one per stage; set it to 4 or more, or use "],
        ),
        (
            "strategy=pipeline strategy.schedule=DualPipeV strategy.num_microbatches=2",
            ["strategy.num_microbatches=2: DualPipeV needs at least one per stage; set it to 4"],
        ),
        (
            "strategy=pipeline strategy.schedule=Interleaved1F1B strategy.num_microbatches=5 train.global_batch_size=5",
            ["strategy.num_microbatches=5: Interleaved1F1B needs a multiple of 2"],
        ),
        (
            "strategy=pipeline strategy.schedule=ZBVZeroBubble strategy.stages_per_rank=3",
            ["strategy.stages_per_rank=3: ZBVZeroBubble needs exactly 2; set it to 2"],
        ),
        (
            "strategy=pipeline strategy.schedule=DualPipeV strategy.stages_per_rank=1",
            ["strategy.stages_per_rank=1: DualPipeV needs exactly 2; set it to 2"],
        ),
        (
            "strategy=pipeline strategy.schedule=Interleaved1F1B strategy.stages_per_rank=1",
            ["strategy.stages_per_rank=1: Interleaved1F1B needs at least 2; set it to 2"],
        ),
        ("strategy=pipeline strategy.stages_per_rank=2", ["strategy.stages_per_rank=2: 1F1B needs exactly 1"]),
        (
            "strategy=pipeline strategy.num_microbatches=4 train.global_batch_size=30",
            [
                "train.global_batch_size=30: cannot be cut evenly into 4 micro-batches; set it to 28 or 32, or change "
                "strategy.num_microbatches"
            ],
        ),
        (
            "strategy=ddp_pipeline strategy.num_microbatches=4 train.global_batch_size=66 train.grad_accumulation=2",
            [
                "train.global_batch_size=66: cannot be cut evenly into 2 replicas x 2 slices x 4 micro-batches; set it "
                "to 64 or 80, or change train.grad_accumulation or strategy.num_microbatches"
            ],
        ),
        (
            "strategy=ddp_pipeline train.global_batch_size=65",
            ["cannot be cut evenly into 2 replicas x micro-batches for 1F1B; set it to 64 or 66, or change"],
        ),
        (
            "strategy=model_parallel train.global_batch_size=7 train.grad_accumulation=2",
            ["cannot be cut evenly into 2 slices; set it to 6 or 8, or change train.grad_accumulation"],
        ),
        (
            "strategy=pipeline train.global_batch_size=1",
            ["train.global_batch_size=1: cannot be cut evenly"],
        ),
        (
            "strategy=pipeline strategy.num_workers=4 strategy.num_microbatches=3 strategy.stages_per_rank=2",
            [
                "strategy.stages_per_rank=2: 1F1B needs exactly 1",
                "strategy.num_microbatches=3: 1F1B needs at least one per stage",
                "train.global_batch_size=64: cannot be cut evenly into 3 micro-batches",
            ],
        ),
        (
            "strategy=ddp_pipeline strategy.num_workers=3 strategy.num_microbatches=1",
            ["strategy.num_workers=3: not divisible", "strategy.num_microbatches=1: 1F1B needs at least one per stage"],
        ),
    ],
)
def test_every_error_is_said_at_once_with_its_remedy(words: str, said: list[str]) -> None:
    found = errors(*words.split())
    assert len(found) == len(said)
    for error, part in zip(found, said, strict=True):
        assert part in error


@pytest.mark.parametrize(("schedule", "accumulation"), [("1F1B", 1), ("DualPipeV", 1), ("GPipe", 3)])
@pytest.mark.parametrize("batch", [5, 65])
def test_the_batch_sizes_that_a_error_names_are_possible(schedule: str, accumulation: int, batch: int) -> None:
    words = ("strategy=ddp_pipeline", f"strategy.schedule={schedule}", f"train.grad_accumulation={accumulation}")
    (error,) = errors(*words, f"train.global_batch_size={batch}")
    for size in error.partition("set it to ")[2].partition(",")[0].split(" or "):
        assert plan(*words, f"train.global_batch_size={size}").global_batch_size == int(size)
