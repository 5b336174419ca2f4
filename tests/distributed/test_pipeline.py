"""Models cut into stages: the losses and parameters of one worker, by every schedule and on every grid."""

from __future__ import annotations

import pytest

from helpers.cases import Case, having
from helpers.gang import Gang
from helpers.layouts import ADAMW, SGD, STAGED, assert_as_alone, passes_constants
from helpers.quick_jobs import TinyGPT, digits


@pytest.mark.parametrize("name", STAGED)
def test_sgd_with_momentum_and_accumulation(gang: Gang, name: str) -> None:
    case = Case(job=digits(depth=3, lr=0.3), train=having(global_batch_size=32, grad_accumulation=2))
    assert_as_alone(gang, case, name, rtol=SGD)


@pytest.mark.parametrize("name", STAGED)
def test_a_language_model_with_adamw(gang: Gang, name: str) -> None:
    job = TinyGPT(layers=3, variant="llama", kv_heads=1, tied=True)
    assert_as_alone(gang, Case(job=job, train=having(global_batch_size=32)), name, rtol=ADAMW)


@passes_constants
def test_documents_that_are_kept_apart(gang: Gang) -> None:
    job = TinyGPT(layers=3, end_token=ord(" "))
    assert_as_alone(gang, Case(job=job, train=having(global_batch_size=32)), "1F1B-2", rtol=ADAMW)
