"""Options of ``ddp`` that exclude each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.cases import DDP, Case, config_of, having, plan_of
from helpers.quick_jobs import digits
from orchestrator.strategies import registry


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
    config = config_of(case, 2)
    errors: list[str] = []
    registry.load("ddp").check(config, digits(), plan_of(config), errors)
    assert len(errors) == len(said)
    for error, part in zip(errors, said, strict=True):
        assert error.startswith("strategy.static_graph=true: ")
        assert part in error
