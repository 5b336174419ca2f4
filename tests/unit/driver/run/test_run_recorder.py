"""What is recorded of a run: its states, and how long it took without its waits."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.records.recorder import Recorder
from orchestrator.config.redact import Redactor
from orchestrator.driver.process.run_context import EventStream
from orchestrator.driver.run.run_recorder import RunRecorder
from orchestrator.policy.recovery import RecoveryPlan, Transition
from orchestrator.protocol.events import FirstStepDone, Recovered, StateChanged
from orchestrator.records.run_dir import RunDir


class Parts:
    """A run that began at ``started_at``, and whose workers need no Ray."""

    def __init__(self, folder: Path, *, started_at: float = 0.0) -> None:
        self.recorder, self.run_dir = Recorder(), RunDir(folder)
        spec = SimpleNamespace(started_at=started_at, run_dir=self.run_dir)
        context: Any = SimpleNamespace(spec=spec, events=EventStream([self.recorder], Redactor()))
        self.workers: Any = SimpleNamespace(
            waits_s={"queue_s": 0.0, "waited_s": 0.0}, plan=SimpleNamespace(mesh=SimpleNamespace(num_workers=2))
        )
        self.run_recorder = RunRecorder(context, self.workers)

    def wait(self, *, queue_s: float, resources_s: float) -> None:
        self.workers.waits_s = {"queue_s": queue_s, "waited_s": resources_s}


def first_step(at: float, generation: int = 1) -> FirstStepDone:
    return FirstStepDone(time=at, generation=generation, startup={"build_s": 0.5})


def test_waits_count_neither_as_start_nor_as_training(tmp_path: Path) -> None:
    now = time.time()
    parts = Parts(tmp_path, started_at=now - 1035)
    parts.wait(queue_s=20.0, resources_s=10.0)
    parts.run_recorder.startup_s["driver_s"] = 0.25
    parts.run_recorder.begin_training(first_step(now - 1000))
    parts.wait(queue_s=500.0, resources_s=430.0)  # it has yielded once
    parts.run_recorder.begin_training(first_step(now))
    summary = parts.run_recorder.summary(step_s=0.1)
    assert summary["queue_s"] == 500.0
    assert summary["waited_s"] == 430.0
    assert summary["startup_s"] == pytest.approx(5)
    assert summary["startup"] == {"driver_s": 0.25, "build_s": 0.5}
    assert summary["effective_time_pct"] == 100


def test_a_run_that_took_no_step_has_no_start_time(tmp_path: Path) -> None:
    assert Parts(tmp_path).run_recorder.summary(step_s=0.0).keys() == {"restarts", "steps_lost", "recovery_s"}


def test_the_record_names_each_state_once_until_the_next_step_is_done(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    run_recorder, recorded = parts.run_recorder, list[Any]()
    run_recorder.enter("waiting")
    run_recorder.enter("running", precision="fp32")
    run_recorder.begin_training(first_step(1.0))
    run_recorder.enter("recovering")
    recorded.append(parts.run_dir.read_record())
    run_recorder.begin_transition(Transition(began=2.0, reached=3, num_workers_before=2, planned=None))
    run_recorder.continue_with(RecoveryPlan(lost=(1,), sources=(0, 0), step=3, pause_s=0), step=3)
    run_recorder.begin_training(first_step(2.5, generation=2))
    recorded.append(parts.run_dir.read_record())
    assert recorded == [
        {"state": "recovering", "precision": "fp32"}, {"state": "running", "precision": "fp32"},
    ]  # fmt: skip
    changes = [event.state for event in parts.recorder.seen if isinstance(event, StateChanged)]
    assert changes == ["running", "recovering", "running"]
    assert [event.seconds for event in parts.recorder.seen if isinstance(event, Recovered)] == [0.5]


def test_a_record_that_cannot_be_written_does_not_end_a_run(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "nowhere")
    parts.run_recorder.enter("running")
    assert len(parts.recorder.seen) == 1
