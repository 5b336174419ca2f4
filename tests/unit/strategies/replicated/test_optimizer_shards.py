"""``strategy.shard_optimizer``: how parameters are divided, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.conformance.cases import Case, checked
from helpers.conformance.layouts import SHARDED_DDP
from helpers.jobs.step_toys import NormedGAN
from helpers.jobs.toys import Toy
from orchestrator.job import Job
from orchestrator.planning.placement import first_overlap, has_hole
from orchestrator.strategies.replicated.optimizer_shards import cut_evenly


@pytest.mark.parametrize("count", [1, 2, 5, 64])
@pytest.mark.parametrize(
    "shapes", [[(1000, 1000)], [(3, 70_001)], [(7,), (5, 3), (1,), (8, 4100, 6), (0,), (2, 2), (640, 10)]]
)
def test_the_parts_of_all_ranks_are_even_whatever_the_shapes(shapes: list[tuple[int, ...]], count: int) -> None:
    cuts = cut_evenly({str(shape): shape for shape in shapes}, count)
    divisible = [shape for shape in shapes if math.prod(shape)]
    assert [*cuts] == [str(shape) for shape in divisible]
    divided = [[cuts[str(shape)].box(shape, index=rank, count=count) for rank in range(count)] for shape in divisible]
    for boxes in divided:
        assert first_overlap([box for box in boxes if math.prod(box.shape)]) is None
        assert not has_hole(boxes)
    held = [sum(math.prod(boxes[rank].shape) for boxes in divided) for rank in range(count)]
    assert max(held) - min(held) <= max(math.prod(shape) // max(shape) for shape in shapes if max(shape))


JOB = Toy(build=lambda: nn.Linear(10, 4), optimizer_of=torch.optim.AdamW)


@pytest.mark.parametrize(
    ("job", "changes", "said"),
    [
        (Toy(build=lambda: nn.Embedding(4, 10, sparse=True)), {}, "weight have sparse gradients"),
        (JOB, {"comm_hook": "powersgd"}, "strategy.comm_hook=powersgd: it keeps errors of whole gradients"),
        (NormedGAN(), {}, "the job overrides Job.training_step"),
    ],
    ids=["sparse", "powersgd", "own updates"],
)
def test_what_cannot_be_divided_is_refused(job: Job, changes: dict[str, Any], said: str) -> None:
    [error], _ = checked(Case(job=job, options=replace(SHARDED_DDP, **changes)), 2)
    assert said in error


def test_the_plan_says_what_each_worker_updates() -> None:
    errors, notes = checked(Case(job=JOB, options=SHARDED_DDP), 3)
    assert errors == []
    assert any("each worker updates at most 17 of 44 elements" in note for note in notes), notes
