"""The steps of an evaluation in stages: complete, in an order that is possible, and no more than needed."""

from __future__ import annotations

import pytest

from orchestrator.planning.schedules import SCHEDULES, PipelineLayout, Schedule
from orchestrator.strategies.pipelined.forward_pass import forward_steps


@pytest.mark.parametrize("microbatches", [1, 2, 5, 16])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_every_stage_processes_every_microbatch_after_the_stage_before(
    schedule: Schedule, workers: int, microbatches: int
) -> None:
    num_stages = workers * schedule.stages_per_rank
    layout = PipelineLayout(
        schedule=schedule.name,
        num_stages=num_stages,
        num_microbatches=microbatches,
        stage_ranks=schedule.stage_ranks(num_stages, workers),
    )
    steps = list(forward_steps(layout))
    at = {item: time for time, step in enumerate(steps) for item in step}
    assert sum(map(len, steps)) == len(at) == num_stages * microbatches
    for stage, number in at:
        assert stage == 0 or at[stage - 1, number] < at[stage, number]
        assert number == 0 or at[stage, number - 1] < at[stage, number]
    for step in steps:
        ranks = [layout.stage_ranks[stage] for stage, _ in step]
        assert len(set(ranks)) == len(ranks)


@pytest.mark.parametrize("name", ["GPipe", "LoopedBFS", "ZBVZeroBubble"])
def test_no_rank_waits_longer_than_the_pipeline_takes_to_fill(name: str) -> None:
    schedule, workers, microbatches = SCHEDULES[name], 4, 8
    num_stages = workers * schedule.stages_per_rank
    layout = PipelineLayout(
        schedule=name,
        num_stages=num_stages,
        num_microbatches=microbatches,
        stage_ranks=schedule.stage_ranks(num_stages, workers),
    )
    filling = 2 * (workers - 1) if schedule.v_shaped else workers - 1
    assert len(list(forward_steps(layout))) == microbatches * schedule.stages_per_rank + filling
