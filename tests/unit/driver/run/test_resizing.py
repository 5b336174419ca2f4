"""Workers that are started while a run trains, with a gang that needs no Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from helpers.cases import Case, config_of, plan_of
from helpers.quick_jobs import digits
from orchestrator.driver.run.resizing import Resizing
from orchestrator.policy.elastic import Sizes


def test_a_run_of_a_fixed_size_seeks_its_spares_while_it_trains() -> None:
    sizes, sought, asked = Sizes.of(plan_of(config_of(Case(job=digits()), 2))), list[int](), list[int]()
    gang: Any = SimpleNamespace(refill=sought.append, ready=lambda: asked.append(1) or 1)
    assert Resizing(gang, sizes).refill_and_find_larger(sizes.largest, others_wait=False) is None
    assert sought == [sizes.max_processes]
    assert asked, "what has become of those that start"
