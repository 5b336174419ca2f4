"""Ranks whose samples use different parameters, of a model whose tensors are divided."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import ADAMW, SGD, assert_as_alone
from helpers.jobs.uneven_jobs import Uneven
from helpers.ranks.gang import Gang

EXPERTS, BLOCKS, NESTED = "auto", ("Part",), ("Parts", "Part")


@pytest.mark.parametrize("adamw", [False, True])
@pytest.mark.parametrize("discards", [False, True])
@pytest.mark.parametrize("wrap", [EXPERTS, BLOCKS, NESTED], ids=["experts", "blocks", "nested"])
@pytest.mark.parametrize("layout", ["fsdp-2", "fsdp-3", "hsdp-2x2", "fsdp-1F1B-2x2"])
@pytest.mark.parametrize("changes", [{}, {"reshard_after_forward": False}, {"prefetch": 2}], ids=["", "kept", "ahead"])
def test_x(gang: Gang, layout: str, wrap: Any, changes: dict[str, Any], adamw: bool, discards: bool) -> None:
    n = {"fsdp-3": 12}.get(layout, 8)
    case = Case(job=Uneven(adamw=adamw, discards=discards), train=having(global_batch_size=n, grad_accumulation=2 if n == 8 and "1F1B" not in layout else 1, steps=16))
    assert_as_alone(gang, case, layout, rtol=ADAMW if adamw else SGD, want_grad_norm=True, wrap=wrap, **changes)
