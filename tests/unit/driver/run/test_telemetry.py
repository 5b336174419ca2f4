"""What the driver emits and returns for a round of heartbeats, with a gang that needs no Ray."""

from pathlib import Path
from typing import Any

import pytest

from helpers.files.golden import Golden
from helpers.machines.simulated import Driver, Gang
from helpers.records.recorder import Recorder
from orchestrator.driver.run import telemetry
from orchestrator.driver.run.telemetry import Telemetry
from orchestrator.protocol.events import CheckpointSaved, FirstStepDone, RankProgress, Warned
from orchestrator.protocol.messages import Heartbeat, TrainPoint
from orchestrator.records.run_dir import RunDir
from orchestrator.worker.control.spool import Spool

SAVED = CheckpointSaved(step=3, path="/run/checkpoints/3", seconds=0.1, stall_ms=1.0, size_bytes=10)


class FakeUploader:
    error: str | None = None
    sinks: str | None = None
    address: str | None = None

    def __init__(self) -> None:
        self.shown: list[str] = []

    def problem(self) -> str | None:
        return self.error

    def sink_problem(self) -> str | None:
        return self.sinks

    def page(self) -> str | None:
        return self.address


def first_step(generation: int) -> FirstStepDone:
    return FirstStepDone(generation=generation, startup={})


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Telemetry, Gang, Recorder, FakeUploader]:
    driver, uploader = Driver(tmp_path), FakeUploader()
    made = Telemetry(driver.context, uploader, FakeUploader(), show_page=uploader.shown.append)  # type: ignore[arg-type]
    return made, driver.gang, driver.recorder, uploader


def test_events_of_workers_are_emitted_after_all_progress_and_returned(parts: Any) -> None:
    made, gang, recorder, _ = parts
    gang.answers = {1: Heartbeat(step=4, phase="train"), 0: Heartbeat(step=3, phase="train", events=(SAVED,))}
    collected = made.collect(gang)
    assert collected.events == (SAVED,)
    assert [type(event) for event in recorder.seen] == [RankProgress, RankProgress, CheckpointSaved]
    assert made.last_step == {0: 3, 1: 4}


def test_the_first_step_of_a_generation_counts_once(parts: Any) -> None:
    made, gang, recorder, _ = parts
    gang.answers = {rank: Heartbeat(step=1, phase="train", events=(first_step(1),)) for rank in (0, 1)}
    assert len(made.collect(gang).events) == 1
    assert (made.has_trained(1), made.has_trained(2)) == (True, False)
    assert made.collect(gang).events == ()
    assert sum(isinstance(event, FirstStepDone) for event in recorder.seen) == 1


def test_a_worker_that_dies_between_two_heartbeats_has_made_progress(parts: Any, tmp_path: Path) -> None:
    """Otherwise a short life would count as a failure without progress."""
    made, gang, _, _ = parts
    gang.answers = {rank: Heartbeat(step=1, phase="train") for rank in (0, 1)}
    made.collect(gang)
    gang.answers = {}
    run_dir = RunDir(tmp_path)
    left = [Spool(run_dir.spool(m.info.node_id, m.info.pid)) for m in gang.members]
    point = TrainPoint(step=2, time=0.0, loss_sum=1.0, weight=1.0, step_ms=(), data_wait_ms=0.0, comm_share=None)
    left[0].append(0, point)
    left[0].append(1, SAVED)
    made.collect_last_reports(gang, run_dir, returned=())
    assert made.last_step == {0: 3, 1: 1}


def test_failing_uploads_are_reported_once_until_they_work_again(
    parts: Any, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    made, gang, recorder, uploader = parts
    monkeypatch.setattr(telemetry, "UPLOAD_CHECK_EVERY_S", 0.0)
    made._next_upload_check = 0.0
    for uploader.error in (None, "timeout", "timeout", None, None):
        made.collect(gang)
    warnings = [event.message for event in recorder.seen if isinstance(event, Warned)]
    golden.says(warnings)
    uploader.sinks = "my.Sink: ValueError"
    made.collect(gang)
    (*_, warning) = [event.message for event in recorder.seen if isinstance(event, Warned)]
    golden.says(warning)


def test_the_page_of_the_run_is_shown_once_as_soon_as_there_is_one(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, gang, _, uploader = parts
    monkeypatch.setattr(telemetry, "UPLOAD_CHECK_EVERY_S", 0.0)
    made._next_upload_check = 0.0
    for uploader.address in (None, "http://mlflow:5000/#/1", "http://mlflow:5000/#/1"):
        made.collect(gang)
    assert uploader.shown == ["http://mlflow:5000/#/1"]
