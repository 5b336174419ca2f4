"""What is recorded of a run: its states, and how long it took without its waits."""

import time
from pathlib import Path
from typing import Any

import pytest

from helpers.machines.simulated import Driver
from orchestrator.driver.run.run_recorder import RunRecorder
from orchestrator.policy.recovery import RecoveryPlan, Transition
from orchestrator.protocol.events import FirstStepDone, Recovered, StateChanged


def first_step(at: float, generation: int = 1) -> FirstStepDone:
    return FirstStepDone(time=at, generation=generation, startup={"build_s": 0.5})


def test_waits_count_neither_as_start_nor_as_training(tmp_path: Path) -> None:
    now = time.time()
    driver = Driver(tmp_path, started_at=now - 1035)
    recorder = RunRecorder(driver.context, driver.workers)
    driver.workers.waits_s = {"queue_s": 20.0, "waited_s": 10.0}
    recorder.startup_s["driver_s"] = 0.25
    recorder.begin_training(first_step(now - 1000))
    driver.workers.waits_s = {"queue_s": 500.0, "waited_s": 430.0}  # it has yielded once
    recorder.begin_training(first_step(now))
    summary = recorder.summary(step_s=0.1)
    assert summary["queue_s"] == 500.0
    assert summary["waited_s"] == 430.0
    assert summary["startup_s"] == pytest.approx(5)
    assert summary["startup"] == {"driver_s": 0.25, "build_s": 0.5}
    assert summary["effective_time_pct"] == 100


def test_a_run_that_took_no_step_has_no_start_time(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    summary = RunRecorder(driver.context, driver.workers).summary(step_s=0.0)
    assert summary.keys() == {"restarts", "steps_lost", "recovery_s"}


def test_the_record_names_each_state_once_until_the_next_step_is_done(tmp_path: Path) -> None:
    driver, recorded = Driver(tmp_path), list[Any]()
    run_recorder = RunRecorder(driver.context, driver.workers)
    run_recorder.enter("waiting")
    run_recorder.enter("running", precision="fp32")
    run_recorder.begin_training(first_step(1.0))
    run_recorder.enter("recovering")
    recorded.append(driver.run_dir.read_record())
    run_recorder.begin_transition(Transition(began=2.0, reached=3, num_workers_before=2, planned=None))
    run_recorder.continue_with(RecoveryPlan(lost=(1,), sources=(0, 0), step=3, pause_s=0), step=3)
    run_recorder.begin_training(first_step(2.5, generation=2))
    recorded.append(driver.run_dir.read_record())
    assert recorded == [
        {"state": "recovering", "precision": "fp32"}, {"state": "running", "precision": "fp32"},
    ]  # fmt: skip
    changes = [event.state for event in driver.recorder.seen if isinstance(event, StateChanged)]
    assert changes == ["running", "recovering", "running"]
    assert [event.seconds for event in driver.recorder.seen if isinstance(event, Recovered)] == [0.5]


def test_a_record_that_cannot_be_written_does_not_end_a_run(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "nowhere")
    RunRecorder(driver.context, driver.workers).enter("running")
    assert len(driver.recorder.seen) == 1
