"""Models cut into stages: the losses and parameters of one worker, by every schedule and on every grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gang import Gang
from torch import Tensor
from toys import Case, TinyGPT, digits, having, losses, train

from orchestrator.config import schema

SGD, ADAMW = 1e-5, 1e-4
MODEL_PARALLEL = schema.ModelParallelConfig(name="model_parallel", num_workers=2, split="auto")


def pipeline(schedule: str, num_microbatches: int, split: Any = "auto") -> schema.PipelineConfig:
    return schema.PipelineConfig(
        name="pipeline",
        num_workers=2,
        split=split,
        schedule=schedule,  # type: ignore[arg-type]
        num_microbatches=num_microbatches,
        stages_per_rank="auto",
    )


def ddp_pipeline(schedule: str, num_microbatches: int, close: str = "stages") -> schema.DDPPipelineConfig:
    return schema.DDPPipelineConfig(
        name="ddp_pipeline",
        num_workers=4,
        pipeline_parallel_size=2,
        close=close,  # type: ignore[arg-type]
        split="auto",
        schedule=schedule,  # type: ignore[arg-type]
        num_microbatches=num_microbatches,
        stages_per_rank="auto",
    )


LAYOUTS = {
    "model_parallel-2": (MODEL_PARALLEL, 2),
    "GPipe-2": (pipeline("GPipe", 4), 2),
    "1F1B-2": (pipeline("1F1B", 4), 2),
    "1F1B-4": (pipeline("1F1B", 4), 4),
    "Interleaved1F1B-2": (pipeline("Interleaved1F1B", 4), 2),
    "LoopedBFS-2": (pipeline("LoopedBFS", 4), 2),
    "InterleavedZeroBubble-2": (pipeline("InterleavedZeroBubble", 4), 2),
    "ZBVZeroBubble-2": (pipeline("ZBVZeroBubble", 4), 2),
    "DualPipeV-2": (pipeline("DualPipeV", 4), 2),
    "GPipe-2x2": (ddp_pipeline("GPipe", 2), 4),
    "1F1B-2x2": (ddp_pipeline("1F1B", 2), 4),
    "1F1B-2x2-replicas-close": (ddp_pipeline("1F1B", 2, "replicas"), 4),
    "ZBVZeroBubble-2x2": (ddp_pipeline("ZBVZeroBubble", 2), 4),
    "InterleavedZeroBubble-2x2": (ddp_pipeline("InterleavedZeroBubble", 2), 4),
}

JOBS = {
    "digits-sgd": (digits(depth=5), SGD),
    "gpt": (TinyGPT(layers=3), ADAMW),
}


@pytest.fixture(scope="module")
def alone() -> dict[Any, Any]:
    return {}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad_accumulation", [1, 2])
def test_equal_loss(gang: Gang, alone: dict[Any, Any], layout: str, job: str, grad_accumulation: int) -> None:
    options, world_size = LAYOUTS[layout]
    what, rtol = JOBS[job]
    case = Case(job=what, train=having(global_batch_size=32, grad_accumulation=grad_accumulation), options=options)
    key = (job, grad_accumulation)
    if key not in alone:
        (alone[key],) = gang.run(train, case, world_size=1)
    ranks = gang.run(train, case, world_size=world_size)
    torch.testing.assert_close(losses(ranks), losses([alone[key]]), rtol=rtol, atol=0)
    whole: dict[str, Tensor] = {}
    for rank in ranks:
        whole |= rank.model
    torch.testing.assert_close(whole, alone[key].model, rtol=100 * rtol, atol=10 * rtol)
