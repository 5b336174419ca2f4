"""What workers have reported since the last heartbeats of a driver that died."""

from pathlib import Path

import pytest

from helpers.machines.simulated import Driver, Gang
from helpers.records.runs import losses
from orchestrator.driver.run.worker_reports import record_ranks, take_left_reports
from orchestrator.protocol.events import CheckpointSaved, Event, FirstStepDone, MetricsLogged, SampleSaved
from orchestrator.protocol.messages import EvalPoint, TrainPoint
from orchestrator.records.journal import Journal
from orchestrator.records.run_dir import RunDir
from orchestrator.worker.control.spool import Spool


def point(step: int, loss: float) -> TrainPoint:
    return TrainPoint(
        step=step, time=float(step), loss_sum=loss, weight=1.0, step_ms=(), data_wait_ms=0.0, comm_share=None
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """Of two ranks, where rank 0 is the process with the higher pid."""
    driver = Driver(tmp_path)
    record_ranks(driver.run_dir, driver.plan, Gang("aa", pids=(9, 8)).members, tokens_per_sample=None)
    return driver.run_dir


def leave(run_dir: RunDir, pid: int, *reports: TrainPoint | EvalPoint | Event) -> None:
    spool = Spool(run_dir.spool("a", pid))
    for number, report in enumerate(reports):
        spool.append(number, report)


def test_points_of_all_ranks_are_joined_and_incomplete_ones_left_out(run_dir: RunDir) -> None:
    leave(run_dir, 9, point(1, 1.0), point(2, 2.0), point(3, 3.0))
    leave(run_dir, 8, point(1, 3.0), point(2, 4.0))
    journal = Journal(run_dir)
    journal.emit(MetricsLogged(step=1, metrics={"train/loss": 2.0}))
    for event in take_left_reports(run_dir, up_to_step=9):
        journal.emit(event)
    journal.close()
    assert losses(run_dir.path) == {1: 2.0, 2: 3.0}
    assert not run_dir.spools.exists()
    assert take_left_reports(run_dir, up_to_step=9) == []


def test_steps_that_are_repeated_are_left_out(run_dir: RunDir) -> None:
    for pid in (8, 9):
        leave(run_dir, pid, point(4, 1.0), point(5, 1.0))
    (logged,) = take_left_reports(run_dir, up_to_step=4)
    assert isinstance(logged, MetricsLogged)
    assert logged.step == 4


def test_events_that_the_dead_driver_wrote_come_not_again(run_dir: RunDir) -> None:
    known, new = (
        CheckpointSaved(time=float(step), step=step, path="/c", seconds=0.1, stall_ms=1.0, size_bytes=1)
        for step in (1, 2)
    )
    sample = SampleSaved(time=3.0, step=2, name="text", path="samples/text.txt")
    leave(run_dir, 9, known, sample, new, FirstStepDone(time=0.0, generation=1, startup={}))
    journal = Journal(run_dir)
    journal.emit(known)
    journal.close()
    assert take_left_reports(run_dir, up_to_step=9) == [new, sample]


def test_evaluations_are_joined(run_dir: RunDir) -> None:
    for pid in (8, 9):
        leave(run_dir, pid, EvalPoint(step=4, time=1.0, loss_sum=float(pid), weight=1.0, sums={}))
    (logged,) = take_left_reports(run_dir, up_to_step=9)
    assert isinstance(logged, MetricsLogged)
    assert (logged.step, logged.metrics) == (4, {"val/loss": 8.5})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"mesh": {"size": 2}}', '{"processes": [{}]}', '{"processes": 3}'])
def test_damaged_or_missing_ranks_leave_nothing(run_dir: RunDir, text: str) -> None:
    for pid in (8, 9):
        leave(run_dir, pid, point(1, 1.0))
    run_dir.ranks_file.write_text(text)
    assert take_left_reports(run_dir, up_to_step=9) == []


def test_a_new_run_has_none(tmp_path: Path) -> None:
    assert take_left_reports(RunDir(tmp_path), up_to_step=9) == []
