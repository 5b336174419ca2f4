"""The process that uploads: when it works, when it ends, and what follows if it or its driver is killed."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from helpers.records.runs import in_campaign, wait_for
from helpers.records.tracked_runs import (
    end,
    ended_run,
    expected,
    follower_of,
    has_imported_mlflow,
    history,
    log,
    new_run,
    run_of,
    start,
    tracking,
)
from orchestrator import sync
from orchestrator.features.tracking.follower import FollowerOptions
from orchestrator.features.tracking.pending_uploads import alone_in_retrying, pending_runs
from orchestrator.features.tracking.transfer import read_cursor
from orchestrator.features.tracking.uploader import RunUploader
from orchestrator.records.ended_runs import exclusive
from orchestrator.records.journal import Journal
from orchestrator.records.lock import this_process
from orchestrator.records.output_dir import OutputDir


def test_a_follower_yields_the_cpu_waits_for_points_and_repeats_a_failed_upload_alone(tmp_path, empty_database):
    store = f"sqlite:///{shutil.copy(empty_database, tmp_path)}"
    run_dir = new_run(tmp_path, uri := "http://127.0.0.1:9")  # nothing listens there
    uploader = RunUploader.start(run_dir, tracking(uri, flush_timeout_s=3.0))
    journal = Journal(run_dir)
    start(journal)
    follower = wait_for(lambda: follower_of(run_dir))
    supervisor = follower.parent()
    assert follower.nice() == 19
    time.sleep(1.5)
    assert not has_imported_mlflow(follower), "the import must not compete with the start of a run"
    log(journal, range(1, 4))
    wait_for(uploader.problem)
    assert has_imported_mlflow(follower)
    supervisor.suspend()  # it would replace a follower that gets no CPU after the training
    try:
        end(journal, run_dir, "KILLED")
        journal.close()
        uploader.leave()
        with exclusive(run_dir) as free:
            assert not free, "it still works"
        with exclusive(run_dir, timeout_s=200) as free:
            assert free, "it only repeats the upload now and then"
        assert sync.main([str(run_dir.path), "--uri", store]) == 0
        wait_for(lambda: follower.status() == psutil.STATUS_ZOMBIE)
    finally:
        supervisor.resume()
    wait_for(lambda: not supervisor.is_running())
    assert run_of(store, run_dir).info.status == "KILLED", "what another process has uploaded is not repeated"


def test_of_the_followers_whose_uploads_fail_one_repeats_them(tmp_path):
    run_dir, other = (new_run(tmp_path, uri := "http://127.0.0.1:9") for _ in range(2))
    uploader = RunUploader.start(run_dir, tracking(uri, flush_timeout_s=0.0))
    journal = Journal(run_dir)
    start(journal)
    end(journal, run_dir)
    journal.close()
    with alone_in_retrying(other) as alone:
        assert alone
        upload = uploader.finish(200)
    assert (upload.complete, upload.in_progress) == (False, False)
    assert "refused" in upload.error
    assert pending_runs(OutputDir(tmp_path / "outputs")) == [run_dir]


@pytest.mark.campaign
def test_a_run_shorter_than_the_upload_interval_is_uploaded_at_its_end(tmp_path, uri):
    run_dir = new_run(tmp_path, uri)
    uploader = RunUploader.start(run_dir, tracking(uri, upload_every_s=60))
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 4))
    follower = wait_for(lambda: follower_of(run_dir))
    time.sleep(2.5)
    assert not has_imported_mlflow(follower), "the import must not compete with the training"
    assert uploader.problem() is None
    end(journal, run_dir)
    journal.close()
    upload = uploader.finish(200)
    assert (upload.uploaded, upload.missing, upload.complete) == (6, 0, True)


BUSY = """
import time
end = time.monotonic() + 150
while time.monotonic() < end:
    pass
"""


@contextlib.contextmanager
def one_cpu():
    """The processes that are started in the block share one CPU for good."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)


@contextlib.contextmanager
def one_busy_cpu():
    """Nothing is left during the block of the CPU of :func:`one_cpu` for processes that yield it."""
    with one_cpu():
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.campaign
def test_a_follower_that_gets_no_cpu_does_not_wait_for_an_idle_one_after_the_training(tmp_path, uri):
    run_dir = new_run(tmp_path, uri)
    with one_cpu():
        uploader = RunUploader.start(run_dir, tracking(uri, upload_every_s=60))
        journal = Journal(run_dir)
        start(journal)
        log(journal, range(1, 4))
        wait_for(lambda: follower_of(run_dir))
    with one_busy_cpu():
        end(journal, run_dir)
        journal.close()
        upload = uploader.finish(200)
    assert (upload.uploaded, upload.missing, upload.complete) == (6, 0, True)


@pytest.mark.parametrize("twice", [False, *in_campaign(True)])
def test_a_follower_that_dies_is_reported_and_replaced(tmp_path, uri, twice):
    run_dir = new_run(tmp_path, uri)
    uploader = RunUploader.start(run_dir, tracking(uri))
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 4))
    wait_for(lambda: read_cursor(run_dir).points == 6)
    wait_for(lambda: follower_of(run_dir)).kill()
    assert "died; another one continues" in wait_for(uploader.problem)
    log(journal, range(4, 7))
    wait_for(lambda: read_cursor(run_dir).points == 12)
    assert uploader.problem() is None
    if twice:
        wait_for(lambda: follower_of(run_dir)).kill()
        wait_for(lambda: follower_of(run_dir) is None)
    end(journal, run_dir)
    journal.close()
    upload = uploader.finish(200)
    assert (upload.uploaded, upload.missing, upload.complete) == (12, 0, True)


class SlowSecrets(tuple):
    """Options with these are sent when a process that does not read them has ended."""

    def __iter__(self):
        time.sleep(0.5)
        return super().__iter__()


def test_a_follower_that_does_not_start_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    run_dir = ended_run(tmp_path, uri := "http://127.0.0.1:9")
    options = FollowerOptions(
        uri=uri,
        request_timeout_s=1,
        upload_every_s=0,
        flush_timeout_s=1,
        background_timeout_s=1,
        events_offset=0,
        driver=this_process(),
        secrets=SlowSecrets(),
    )
    uploader = RunUploader(run_dir, options)
    assert "died; another one continues" in wait_for(uploader.problem)
    upload = uploader.finish(10)
    assert (upload.missing, upload.complete) == (20, False)


@pytest.mark.campaign
def test_a_follower_that_died_too_often_is_started_again_later(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    uploader = RunUploader.start(ended_run(tmp_path, uri := "http://127.0.0.1:9"), tracking(uri))
    for _ in range(3):
        assert "died; another one continues" in wait_for(uploader.problem)
    assert "the upload process died 4 times" in wait_for(uploader.problem)
    monkeypatch.setattr("orchestrator.features.tracking.uploader.RESTARTS_COUNT_S", 0.0)
    assert "died; another one continues" in wait_for(uploader.problem)
    uploader.finish(10)


DRIVER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from orchestrator.config.operation import TrackingConfig
from orchestrator.protocol.events import MetricsLogged, RunStarted
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.lock import this_process
from orchestrator.records.run_dir import RunDir
from orchestrator.records.journal import Journal
from orchestrator.features.tracking.uploader import RunUploader

run_dir = RunDir(Path(sys.argv[1]))
run_dir.update_record(driver=this_process())
journal = Journal(run_dir)
tracking = TrackingConfig(
    uri=sys.argv[2],
    experiment="tests",
    request_timeout_s=5,
    upload_every_s=60,
    flush_timeout_s=120,
    background_timeout_s=120,
    log_model=False,
    log_dataset=False,
    system_metrics_every_s=0,
    tensorboard=False,
    sinks=(),
)
uploader = RunUploader.start(run_dir, tracking)
journal.emit(RunStarted(name="n", run_dir="", strategy="ddp", job="digits", world_size=2, steps=9))
for step in (1, 2, 3):
    journal.emit(MetricsLogged(step=step, metrics={"train/loss": 1 / step}))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.campaign
def test_kill_minus_nine_of_the_driver_ends_as_killed_although_others_use_all_cpus(tmp_path, uri):
    run_dir = new_run(tmp_path, uri)
    with one_cpu():
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(run_dir.path), uri], stdout=subprocess.PIPE, start_new_session=True
        )
    driver.stdout.readline()
    wait_for(lambda: follower_of(run_dir))
    with one_busy_cpu():
        os.killpg(driver.pid, signal.SIGKILL)  # with all that would die with it
        wait_for(lambda: run_dir.read_record()["state"] == "killed")
        wait_for(lambda: run_dir.read_record().get("mlflow_run_id"))
    with exclusive(run_dir, timeout_s=20) as ended:
        assert ended
    driver.wait(timeout=10)
    driver.stdout.close()
    run = run_of(uri, run_dir)
    assert run.info.status == "KILLED"
    assert history(uri, run.info.run_id) == expected(run_dir)
    assert run_dir.read_record()["mlflow_run_id"] == run.info.run_id
    last = json.loads(run_dir.events_file.read_text().splitlines()[-1])
    assert (last["event"], last["status"]) == ("run_ended", "KILLED")
