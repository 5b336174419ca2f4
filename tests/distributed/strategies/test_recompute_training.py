"""Activation checkpointing changes no bit of a loss, also with dropout and running statistics."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import LAYOUTS
from helpers.conformance.training import assert_same, losses, train
from helpers.jobs.block_jobs import BlockDigits
from helpers.ranks.gang import Gang
from helpers.records.runs import in_campaign

STARTS = {"1F1B-2": (1,), "ZBVZeroBubble-2": (0, 1, 2)}
"""The blocks that begin a stage."""


@pytest.mark.in_turn
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("ZBVZeroBubble-2", "blocks"),
        ("fsdp-2", "selective"),
        *in_campaign(("ddp-2", "blocks"), ("1F1B-2", "selective")),
    ],
)
def test_losses_and_models_are_equal(gang: Gang, name: str, mode: Any, listed: bool) -> None:
    layout = LAYOUTS[name]
    prefix = "blocks." if listed else "block"
    cut = {"split": tuple(f"{prefix}{i}" for i in STARTS[name])} if name in STARTS else {}
    case = layout.of(Case(job=BlockDigits(hidden=24, listed=listed), train=having(steps=6, grad_accumulation=2)), **cut)
    recomputed = replace(case, train=having(case.train, activation_checkpointing=mode))
    kept = gang.run(train, case, world_size=layout.world_size)
    again = gang.run(train, recomputed, world_size=layout.world_size)
    assert torch.equal(losses(again), losses(kept))
    for rank, other in zip(again, kept, strict=True):
        assert_same(rank.model, other.model)
