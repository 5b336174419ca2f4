"""Whole runs with parameters on shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helpers.runs import events, losses, series

SERVER = ("strategy=parameter_server", "strategy.num_workers=2", "strategy.num_shards=2")


@pytest.mark.campaign
def test_synchronous_losses_are_those_of_one_worker(run: Callable[..., Any]) -> None:
    common = (
        "train.log_every=1", "train.eval_every=10", "train.global_batch_size=65", "job.hidden=64",
    )  # fmt: skip
    alone = run("strategy=single", "train.steps=20", *common)
    served = run(*SERVER, "train.steps=20", *common, "checkpoint.every=10")
    assert served.status == "FINISHED"
    assert list(losses(served.run_dir).values()) == pytest.approx(list(losses(alone.run_dir).values()), rel=1e-5)
    for name in ("val/loss", "val/accuracy", "train/lr"):
        expected = series(alone.run_dir, name)
        assert series(served.run_dir, name) == pytest.approx(expected, rel=1e-5)
    assert all(value == 100 for value in series(served.run_dir, "parameter_server/pulled_pct").values())
    assert [path.name for path in sorted((served.run_dir / "checkpoints").iterdir())] == [
        "step-00000010", "step-00000020",
    ]  # fmt: skip
    again = run("strategy=ddp", "train.steps=22", *common, f"resume={served.run_dir}")
    assert sorted(losses(again.run_dir)) == list(range(1, 23))


def test_a_loss_that_diverges_names_the_bound_to_lower(run: Callable[..., Any]) -> None:
    words = ("strategy.consistency=stale", "strategy.max_staleness=3", "job.lr=1e6", "job.hidden=64", "train.steps=50")
    result = run(*SERVER, *words)
    assert result.status == "FAILED"
    assert "lower strategy.max_staleness=3" in result.reason
    (failed,) = events(result.run_dir, "worker_failed")
    assert failed["rank"] in (0, 1)
