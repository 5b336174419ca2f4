"""The rules of the pipeline schedules are those of ``torch.distributed.pipelining`` itself, no more and no less."""

import contextlib
import functools
import io
from typing import get_args, get_type_hints

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from orchestrator.planning.schedules import SCHEDULES, PipelineLayout, Schedule
from orchestrator.strategies.keys import MeshConfig

MOST = 13
"""Micro-batches tried."""


@functools.cache
def torch_accepts(schedule: Schedule, workers: int, microbatches: int, stages_per_rank: int) -> bool:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            get_schedule_ops(schedule.name, workers, microbatches, stages_per_rank)
    except (ValueError, AssertionError):
        return False
    return True


def stages_allowed(schedule: Schedule) -> tuple[int, ...]:
    least = schedule.stages_per_rank
    return (least, least + 1, least + 2) if schedule.more_stages else (least,)


@pytest.mark.parametrize("workers", [2, *(pytest.param(n, marks=pytest.mark.campaign) for n in (3, 4))])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_the_numbers_of_microbatches_are_those_that_torch_accepts(schedule: Schedule, workers: int) -> None:
    for stages_per_rank in stages_allowed(schedule):
        for m in range(1, MOST):
            error = schedule.microbatches_error(m, workers * stages_per_rank, workers)
            assert (error is None) == torch_accepts(schedule, workers, m, stages_per_rank), (m, stages_per_rank)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_the_numbers_of_stages_are_those_that_torch_accepts(schedule: Schedule) -> None:
    workers, enough = 2, 12
    accepted = [v for v in range(1, 5) if torch_accepts(schedule, workers, enough, v)]
    assert accepted[0] == schedule.stages_per_rank
    assert (len(accepted) > 1) == schedule.more_stages


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_the_stages_are_where_torch_has_them(schedule: Schedule, workers: int) -> None:
    if not issubclass(get_schedule_class(schedule.name), PipelineScheduleMulti):
        assert schedule.stage_ranks(workers, workers) == tuple(range(workers))
        return
    for stages_per_rank in stages_allowed(schedule):
        num_stages = workers * stages_per_rank
        ranks = schedule.stage_ranks(num_stages, workers)
        with contextlib.redirect_stdout(io.StringIO()):
            listed = get_schedule_ops(schedule.name, workers, 2 * num_stages, stages_per_rank)
        for rank, actions in enumerate(listed):
            own = {a.stage_index for action in actions if action for a in (action.sub_actions or (action,))}
            assert own == {stage for stage, at in enumerate(ranks) if at == rank}


def test_the_configuration_offers_every_one_of_them() -> None:
    assert get_args(get_type_hints(MeshConfig)["schedule"]) == tuple(SCHEDULES)


@pytest.mark.parametrize(
    ("name", "microbatches", "stages", "workers", "said"),
    [
        ("1F1B", 3, 4, 4, "needs at least one per stage; set it to 4 or more, or use strategy.schedule=GPipe"),
        ("DualPipeV", 3, 4, 2, "set it to 4 or more"),
        ("Interleaved1F1B", 5, 4, 2, "needs a multiple of 2, the number of workers of a pipeline"),
        ("InterleavedZeroBubble", 6, 8, 4, None),
        ("GPipe", 1, 4, 4, None),
    ],
)
def test_a_error_names_the_remedy(name: str, microbatches: int, stages: int, workers: int, said: str | None) -> None:
    error = SCHEDULES[name].microbatches_error(microbatches, stages, workers)
    assert error is None if said is None else said in str(error)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("samples", [(1,), (7,), (32,), (64, 48), (33, 32), (60,)])
def test_the_number_that_is_chosen_divides_the_batch_and_keeps_the_rules(
    schedule: Schedule, workers: int, samples: tuple[int, ...]
) -> None:
    num_stages = workers * schedule.stages_per_rank
    possible = [
        m
        for m in range(1, min(samples) + 1)
        if all(n % m == 0 for n in samples) and schedule.microbatches_error(m, num_stages, workers) is None
    ]
    chosen = schedule.choose_microbatches(samples, num_stages, workers)
    if not possible:
        assert chosen is None
        return
    assert chosen in possible
    enough = [m for m in possible if m >= 2 * num_stages]
    assert chosen == (min(enough) if enough else max(possible))


def test_a_layout_knows_the_stages_of_each_worker() -> None:
    ranks = SCHEDULES["ZBVZeroBubble"].stage_ranks(6, 3)
    layout = PipelineLayout(schedule="ZBVZeroBubble", num_stages=6, num_microbatches=6, stage_ranks=ranks)
    assert [layout.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    ranks = SCHEDULES["LoopedBFS"].stage_ranks(6, 3)
    layout = PipelineLayout(schedule="LoopedBFS", num_stages=6, num_microbatches=6, stage_ranks=ranks)
    assert [layout.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
