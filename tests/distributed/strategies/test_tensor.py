"""Layers divided over workers: as one worker alone trains them."""

from __future__ import annotations

import pytest

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import ADAMW, TENSOR, assert_as_alone
from helpers.jobs.matrix_optimizers import OfGPT, Preconditioned
from helpers.jobs.quick_jobs import TinyGPT
from helpers.ranks.gang import Gang


@pytest.mark.parametrize("layout", TENSOR)
def test_equal(gang: Gang, layout: str) -> None:
    job = TinyGPT(layers=3, variant="llama", kv_heads=2, tied=True)
    case = Case(job=job, train=having(steps=6, clip_norm=0.5, grad_accumulation=2, global_batch_size=16))
    assert_as_alone(gang, case, TENSOR[layout], rtol=ADAMW / 10, want_grad_norm=True)


@pytest.mark.parametrize("layout", ["mesh-replicated-tensor-2x2", "mesh-sharded-tensor-2x2"])
def test_an_optimizer_gets_whole_tensors(gang: Gang, layout: str) -> None:
    """Of a matrix, a worker has a part of the rows or columns, or of these the rows of a shard."""
    case = Case(job=OfGPT(layers=3, kind=Preconditioned), train=having(steps=6, clip_norm=0.5, global_batch_size=16))
    assert_as_alone(gang, case, TENSOR[layout], rtol=ADAMW, want_grad_norm=True)
