"""What ``debug=true`` makes of a configuration."""

import pytest

from orchestrator.driver.checked_runs import check_all
from orchestrator.driver.preflight import child_checks, resume


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("a child process")


@pytest.fixture(autouse=True)
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_checks, "in_child", refuse)
    monkeypatch.setattr(resume, "continuation_errors", refuse)


@pytest.mark.needs("tracking")
def test_nothing_starts_beside_the_only_worker() -> None:
    words = ["debug=true", "strategy=ddp", "strategy.num_workers=4", "data.num_workers=3", "recovery.spares=2"]
    words += ["recovery.chaos=[kill@5:3]", "tracking.tensorboard=true", "cluster.address=10.0.0.1:6379"]
    (checked_run,) = check_all([words])
    plan, config = checked_run.sizes.initial, checked_run.config
    assert (plan.strategy, plan.world_size, plan.spares, plan.loader_processes, plan.faults) == ("ddp", 1, 0, 0, ())
    assert (config.tracking.uri, config.tracking.all_sinks) == (None, ())
    assert config.cluster.address is None
    assert config.recovery.max_failures == 0


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        (["strategy=ddp", "strategy.num_workers=[2,8]"], "ddp"),
        pytest.param(["strategy=dp", "strategy.num_workers=2"], "dp", marks=pytest.mark.needs("asynchronous")),
        (["strategy=pipeline", "strategy.num_workers=3"], "single"),
    ],
)
def test_a_strategy_of_several_ranks_gives_way_and_the_user_is_told(words: list[str], strategy: str) -> None:
    (checked_run,) = check_all([["debug=true", *words]])
    assert checked_run.sizes.initial.strategy == strategy
    assert checked_run.sizes.initial.world_size == 1
    (note,) = checked_run.notes
    asked = words[0].partition("=")[2]
    assert f"strategy={asked} {'has one worker' if asked == strategy else 'needs other processes'}" in note
    assert checked_run.config.run_name == f"digits-{asked}"


def test_a_run_without_debug_is_checked_in_a_child() -> None:
    with pytest.raises(AssertionError, match="a child process"):
        check_all([["strategy=ddp"]])
