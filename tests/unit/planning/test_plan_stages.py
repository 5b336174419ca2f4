"""What the plan says of strategies that cut the model: stages, micro-batches, and all that cannot be."""

import pytest

from helpers.files.golden import Golden
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
    assert layout.num_microbatches == expected


def test_replicas_may_have_uneven_shares_where_one_microbatch_is_legal(golden: Golden) -> None:
    found = plan("strategy=ddp_pipeline", "strategy.schedule=GPipe", "train.global_batch_size=65")
    assert [w.samples_per_step for w in found.workers] == [33, 33, 32, 32]
    golden.says(found.notes)


# What cannot be -----------------------------------------------------------------------------------


def test_every_error_is_said_at_once_with_its_remedy(golden: Golden) -> None:
    golden.answers("errors/stages", lambda *words: "\n".join(errors(*words)))


@pytest.mark.parametrize(("schedule", "accumulation"), [("1F1B", 1), ("DualPipeV", 1), ("GPipe", 3)])
@pytest.mark.parametrize("batch", [5, 65])
def test_the_batch_sizes_that_a_error_names_are_possible(schedule: str, accumulation: int, batch: int) -> None:
    words = ("strategy=ddp_pipeline", f"strategy.schedule={schedule}", f"train.grad_accumulation={accumulation}")
    (error,) = errors(*words, f"train.global_batch_size={batch}")
    for size in error.partition("set it to ")[2].partition(",")[0].split(" or "):
        assert plan(*words, f"train.global_batch_size={size}").global_batch_size == int(size)
