"""Layers divided over workers: as one worker alone trains them."""

from __future__ import annotations

import pytest

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import ADAMW, TENSOR, assert_as_alone
from helpers.jobs.quick_jobs import TinyGPT
from helpers.ranks.gang import Gang


@pytest.mark.parametrize("layout", TENSOR)
def test_equal(gang: Gang, layout: str) -> None:
    job = TinyGPT(layers=3, variant="llama", kv_heads=2, tied=True)
    case = Case(job=job, train=having(steps=6, clip_norm=0.5, grad_accumulation=2, global_batch_size=16))
    assert_as_alone(gang, case, TENSOR[layout], rtol=ADAMW / 10, want_grad_norm=True)
