"""The steps of an evaluation in stages: complete, in an order that is possible, and no more than needed."""

from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from orchestrator.model.stages.own_stages import Stage
from orchestrator.model.stages.sequence import LayerSequence
from orchestrator.planning.schedules import SCHEDULES, PipelineLayout, Schedule
from orchestrator.strategies.parts.chain import forward_only, forward_steps


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


def test_an_output_is_there_before_the_next_one_is_computed() -> None:
    """A worker that has all stages, and so nothing to exchange."""
    computed: list[int] = []

    class Head(nn.Module):
        def forward(self, number: int) -> int:
            computed.append(number)
            return number

    stage = Stage(index=0, module=Head(), sequence=cast(LayerSequence, None), layers={}, inputs=None, outputs=None)
    layout = PipelineLayout(schedule="GPipe", num_stages=1, num_microbatches=3, stage_ranks=(0,))
    no_group = cast(dist.ProcessGroup, None)
    outputs = forward_only([stage], [5, 6, 7], layout=layout, group=no_group, device=torch.device("cpu"))
    assert [(output, list(computed)) for output in outputs] == [(5, [5]), (6, [5, 6]), (7, [5, 6, 7])]
