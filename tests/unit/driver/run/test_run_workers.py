"""The workers of a run whose gang needs no Ray."""

from types import SimpleNamespace
from typing import Any

import pytest

from helpers.conformance.cases import Case, config_of, plan_of
from helpers.jobs.quick_jobs import digits
from orchestrator.driver.run.run_workers import RunWorkers
from orchestrator.policy.elastic import Sizes


@pytest.mark.parametrize("others_wait", [False, True])
def test_a_run_of_a_fixed_size_seeks_its_spares_while_it_trains(others_wait: bool) -> None:
    sizes, sought = Sizes.of(plan_of(config_of(Case(job=digits()), 2))), list[int]()
    workers: Any = SimpleNamespace(
        plan=sizes.largest,
        gang=SimpleNamespace(refill=sought.append, ready=lambda: 1),
        turns=SimpleNamespace(others_wait=others_wait),
        _sizes=sizes,
    )
    RunWorkers.refill(workers)
    assert sought == [sizes.max_processes]
    assert RunWorkers.find_larger(workers) is None
