"""Every precision on a GPU: losses close to those of float32, and those of one worker in every layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import LAYOUTS, assert_as_alone
from helpers.conformance.training import losses, make, steps, train
from helpers.jobs.quick_jobs import TinyGPT
from helpers.ranks.gang import Gang
from jobs.gpt import GPT

LAYOUT_NAMES = ("ddp-2", "1F1B-2", "ZBVZeroBubble-2", "GPipe-2x2")
TOLERANCE = {"tf32": 0.005, "bf16": 0.03, "bf16-true": 0.08, "fp16": 0.01}
"""Relative, of every loss: about the unit roundoff of the dtype, times the number of steps."""


@pytest.mark.parametrize("precision", TOLERANCE)
def test_every_layout_has_the_losses_of_one_worker(gang: Gang, precision: str) -> None:
    """If it fails, a precision is applied differently on one worker and on several."""
    case = Case(job=TinyGPT(width=64), train=having(precision=precision, grad_accumulation=2, clip_norm=0.5))
    seen = assert_as_alone(gang, case, *LAYOUT_NAMES, rtol=TOLERANCE[precision])
    (exact,) = gang.run(train, replace(case, train=having(case.train, precision="fp32")), world_size=1)
    for ranks in seen.values():
        torch.testing.assert_close(losses(ranks), losses([exact]), rtol=2 * TOLERANCE[precision], atol=0)
    if precision != "tf32":
        assert not any(torch.equal(losses(ranks), losses([exact])) for ranks in seen.values())
    dtypes = {t.dtype for ranks in seen.values() for r in ranks for t in r.model.values() if t.is_floating_point()}
    assert dtypes == {torch.bfloat16 if precision == "bf16-true" else torch.float32}


@pytest.mark.parametrize("how", ["blocks", "selective"])
@pytest.mark.parametrize("name", ["single", "ddp-2", "1F1B-2"])
def test_recomputed_blocks_have_the_same_losses(gang: Gang, name: str, how: Literal["blocks", "selective"]) -> None:
    """If it fails, a block that is computed again differs, such as by its random numbers."""
    layout = LAYOUTS[name]
    kept = layout.of(Case(job=TinyGPT(layers=4), train=having(steps=6, grad_accumulation=2)))
    recomputed = replace(kept, train=having(kept.train, activation_checkpointing=how))
    expected, found = (gang.run(train, case, world_size=layout.world_size) for case in (kept, recomputed))
    torch.testing.assert_close(losses(found), losses(expected), rtol=1e-4, atol=0)


@dataclass(frozen=True, kw_only=True)
class DeepGPT(GPT):
    """Its activations take far more memory than its parameters."""

    layers: int = 8
    width: int = 128
    heads: int = 4
    context: int = 256


def peak_memory(rank: int, case: Case) -> int:
    """The most bytes that three steps have taken, with the model and without what was there before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    list(steps(make(case, rank), last=3))
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.usefixtures("gpu")
def test_recomputed_blocks_take_less_memory(gang: Gang) -> None:
    """If it fails, ``train.activation_checkpointing`` keeps the activations."""
    case = Case(job=DeepGPT(), train=having(global_batch_size=32))
    (kept,) = gang.run(peak_memory, case, world_size=1)
    (recomputed,) = gang.run(
        peak_memory, replace(case, train=having(case.train, activation_checkpointing="blocks")), world_size=1
    )
    assert recomputed < 0.6 * kept
