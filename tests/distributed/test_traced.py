"""Models that are no Sequential are cut by the tracer, skip connections and all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gang import Gang
from layouts import MODEL_PARALLEL, SGD, ddp_pipeline, pipeline
from torch import Tensor
from toys import Branched, Case, having, losses, train

from orchestrator.config import schema


@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        (replace(MODEL_PARALLEL, split=("deep",)), 2),
        (pipeline("1F1B", 4, ("deep.2",)), 2),
        (pipeline("1F1B", 4), 4),
        (pipeline("ZBVZeroBubble", 4), 2),
        (ddp_pipeline("Interleaved1F1B", 4), 4),
    ],
    ids=["model_parallel", "inside-a-layer", "auto-4", "ZBVZeroBubble", "2x2"],
)
def test_a_model_that_is_no_sequential(gang: Gang, options: schema.StrategyConfig, world_size: int) -> None:
    case = Case(job=Branched(), train=having(global_batch_size=32), options=options)
    (alone,) = gang.run(train, case, world_size=1)
    ranks = gang.run(train, case, world_size=world_size)
    torch.testing.assert_close(losses(ranks), losses([alone]), rtol=SGD, atol=0)
    whole: dict[str, Tensor] = {}
    for rank in ranks:
        whole |= rank.model
    torch.testing.assert_close(whole, alone.model, rtol=100 * SGD, atol=10 * SGD)
