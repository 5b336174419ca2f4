"""How long a run took to start and to train, without its waits."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.driver.run.run_times import RunTimes
from orchestrator.policy.transitions import TransitionLog
from orchestrator.protocol.events import FirstStepDone


def first_step(at: float) -> FirstStepDone:
    return FirstStepDone(time=at, generation=1, startup={"build_s": 0.5})


def test_waits_count_neither_as_start_nor_as_training() -> None:
    queue: Any = SimpleNamespace(waited_s=20.0)
    gang: Any = SimpleNamespace(waited_s=10.0)
    now = time.time()
    times = RunTimes(now - 1035, queue, gang)
    times.startup_s["driver_s"] = 0.25
    times.begin_training(first_step(now - 1000))
    queue.waited_s, gang.waited_s = 500.0, 430.0  # it has yielded once
    times.begin_training(first_step(now))
    transitions = TransitionLog()
    summary = times.summary(transitions, step_s=0.1)
    assert summary["queue_s"] == 500.0
    assert summary["waited_s"] == 430.0
    assert summary["startup_s"] == pytest.approx(5)
    assert summary["startup"] == {"driver_s": 0.25, "build_s": 0.5}
    assert summary["effective_time_pct"] == 100


def test_a_run_that_took_no_step_has_no_start_time() -> None:
    idle: Any = SimpleNamespace(waited_s=0.0)
    assert RunTimes(0.0, idle, idle).summary(TransitionLog(), step_s=0.0) == {}
