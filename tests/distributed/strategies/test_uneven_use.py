"""Ranks that use different parameters of a model whose tensors are divided."""

from functools import partial
from typing import Any

import pytest

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import ADAMW, LAYOUTS, SGD, assert_as_alone
from helpers.conformance.training import train
from helpers.jobs.uneven_jobs import OfOneRank, Repeated, Uneven, uneven
from helpers.ranks.gang import Gang
from helpers.records.runs import in_campaign

EXPERTS, BLOCKS, NESTED = {"wrap": "auto"}, {"wrap": ("Part",)}, {"wrap": ("Parts", "Part")}
KEPT, AHEAD = {"reshard_after_forward": False}, {"prefetch": 2}


@pytest.mark.parametrize(
    ("layout", "changes", "job"),
    [
        ("fsdp-2", BLOCKS, {"adamw": True, "build": partial(uneven, True)}),
        *in_campaign(
            ("fsdp-1F1B-2x2", NESTED, {}),
            *(
                (layout, {**wrap, **changes}, {"adamw": adamw, "build": partial(uneven, discards)})
                for layout in ("fsdp-2", "fsdp-3", "hsdp-2x2", "fsdp-1F1B-2x2")
                for wrap in (EXPERTS, BLOCKS, NESTED)
                for changes in ({}, KEPT, AHEAD)
                for adamw, discards in ((False, False), (True, True))
            ),
            ("fsdp-ZBVZeroBubble-2x2", BLOCKS, {"adamw": True, "build": partial(uneven, True)}),
        ),
    ],
)
def test_what_a_rank_lacks_is_zero_and_what_all_lack_is_not_updated(
    gang: Gang, layout: str, changes: dict[str, Any], job: dict[str, Any]
) -> None:
    """Of a batch of few samples, a micro-batch has two."""
    in_slices = layout in ("fsdp-2", "hsdp-2x2")
    batch = {"global_batch_size": 12 if layout == "fsdp-3" else 8, "grad_accumulation": 2 if in_slices else 1}
    case = Case(job=Uneven(**job), train=having(**batch, steps=16))
    rtol = ADAMW if job.get("adamw") else SGD
    assert_as_alone(gang, case, layout, rtol=rtol, want_grad_norm=True, **changes)


@pytest.mark.parametrize(
    "changes", [{"activation_checkpointing": "blocks"}, *in_campaign({"precision": "bf16"})], ids=str
)
def test_experts_in_16_bits_and_computed_again(gang: Gang, changes: dict[str, Any]) -> None:
    case = Case(job=Uneven(), train=having(global_batch_size=8, steps=16, **changes))
    assert_as_alone(gang, case, "fsdp-2", rtol=1e-2 if "precision" in changes else SGD, want_grad_norm=True)


def test_blocks_are_called_unequally_often(gang: Gang) -> None:
    case = Case(job=Uneven(build=Repeated), train=having(global_batch_size=8, steps=16))
    assert_as_alone(gang, case, "hsdp-2x2", want_grad_norm=True)


def test_a_block_that_one_rank_calls_is_found_without_numbers(gang: Gang) -> None:
    assert_as_alone(
        gang, Case(job=Uneven(build=OfOneRank), train=having(global_batch_size=8)), "fsdp-2", want_grad_norm=True
    )


def test_a_part_of_a_block_that_is_computed_again_is_not_skipped(gang: Gang) -> None:
    case = Case(job=Uneven(), train=having(global_batch_size=8, activation_checkpointing="blocks"))
    answers = gang.ask(train, LAYOUTS["fsdp-2"].of(case, **BLOCKS), world_size=2)
    assert any("strategy.wrap: no sample of a batch uses" in str(answer.error) for answer in answers)
