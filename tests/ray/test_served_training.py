"""Whole runs with parameters on servers."""

from collections.abc import Callable
from typing import Any

import pytest

from helpers.records.runs import events

SERVER = ("strategy=parameter_server", "strategy.num_workers=2", "strategy.num_shards=1")


@pytest.mark.campaign
def test_a_loss_that_diverges_names_the_bound_to_lower(run: Callable[..., Any]) -> None:
    words = ("strategy.consistency=stale", "strategy.max_staleness=3", "job.lr=1e6", "job.hidden=64", "train.steps=50")
    result = run(*SERVER, *words)
    assert result.status == "FAILED"
    assert "lower strategy.max_staleness=3" in result.reason
    (failed,) = events(result.run_dir, "worker_failed")
    assert failed["rank"] in (0, 1)
