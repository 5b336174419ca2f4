"""Options of ``ddp`` that exclude each other."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.conformance.cases import DDP, Case, checked, config_of, having, plan_of
from helpers.conformance.layouts import SHARDED_DDP
from helpers.jobs.quick_jobs import QuickDigits, digits
from helpers.jobs.step_toys import NormedGAN
from helpers.jobs.toys import Toy
from orchestrator.job import Job
from orchestrator.planning.placement import first_overlap, has_hole
from orchestrator.strategies import registry
from orchestrator.strategies.owner import cut_evenly
from orchestrator.strategies.replicated.ddp_options import bucket_arguments, bucket_mb_for


@pytest.mark.parametrize(
    ("train", "options", "said"),
    [
        ({}, {}, []),
        ({"grad_accumulation": 2}, {}, ["train.grad_accumulation=2; set that to 1"]),
        ({"compile": True}, {"bucket_mb": 25}, ["train.compile=false"]),
        ({}, {"find_unused_parameters": True}, ["strategy.find_unused_parameters=false"]),
    ],
    ids=["alone", "accumulation", "compiled", "unused parameters"],
)
def test_a_static_graph_is_refused_where_the_graph_is_not_static(
    train: dict[str, Any], options: dict[str, Any], said: list[str]
) -> None:
    case = Case(job=digits(), options=replace(DDP, static_graph=True, **options), train=having(**train))
    errors, _ = checked(case, 2)
    assert len(errors) == len(said)
    for error, part in zip(errors, said, strict=True):
        assert error.startswith("strategy.static_graph=true: ")
        assert part in error


def parameters(mb: float) -> list[Tensor]:
    frozen = torch.empty(2**30, device="meta")
    return [frozen, torch.empty(int(mb * 2**18), device="meta", requires_grad=True)]


@pytest.mark.parametrize(("gradients_mb", "chosen_mb"), [(0, 25), (200, 25), (400, 50), (1600, 200), (4000, 200)])
def test_auto_buckets_on_gpus_are_an_eighth_of_the_gradients(gradients_mb: float, chosen_mb: float) -> None:
    assert bucket_mb_for(parameters(gradients_mb), "auto", device="cuda") == chosen_mb
    assert bucket_mb_for(parameters(gradients_mb), "auto", device="cpu") == 25
    assert bucket_mb_for(parameters(gradients_mb), 3.5, device="cuda") == 3.5


def test_the_first_bucket_stays_small_on_a_gpu_where_torch_chooses() -> None:
    few, many = parameters(40), parameters(800)
    assert bucket_arguments(few, "auto", device="cuda") == {}
    assert bucket_arguments(many, "auto", device="cuda") == {"bucket_cap_mb": 100}
    assert (
        bucket_arguments(few, "auto", device="cpu") == bucket_arguments(few, 25, device="cuda") == {"bucket_cap_mb": 25}
    )


class Wide(QuickDigits):
    """A model with 400 MiB of gradients."""

    def model(self) -> nn.Module:
        return nn.Linear(100 * 2**10, 2**10, bias=False)


def test_a_size_that_auto_chooses_is_said() -> None:
    case = Case(job=Wide(), options=replace(DDP, bucket_mb="auto"))
    config = config_of(case, 2)
    plan, check = plan_of(config), registry.load("ddp").check
    on_gpus = replace(plan, device="cuda")
    assert check(config, case.job, on_gpus, []) == ("strategy.bucket_mb=auto: gradient buckets of 50 MiB",)
    half = replace(config, train=having(precision="bf16-true"))
    assert check(config, case.job, plan, []) == check(half, case.job, on_gpus, []) == ()


# strategy.shard_optimizer -------------------------------------------------------------------------


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
