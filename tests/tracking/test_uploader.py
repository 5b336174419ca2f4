"""What the driver uses to upload a run, with a real store and a real follower."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from helpers.machines.disks import mounted
from helpers.records.recorder import Recorder
from helpers.records.runs import in_campaign, wait_for
from helpers.records.tracked_runs import (
    client_of,
    end,
    ended_run,
    expected,
    follower_of,
    history,
    log,
    new_run,
    run_of,
    start,
    tracking,
)
from orchestrator.config.operation import StorageConfig
from orchestrator.config.redact import Redactor
from orchestrator.driver.ending import PROMPT_WAIT_S, RunEnding
from orchestrator.driver.process.origin import HERE
from orchestrator.driver.process.run_context import EventStream, RunResult
from orchestrator.driver.reporting import RecordUpload
from orchestrator.features.tracking.pending_uploads import note_pending, pending_runs
from orchestrator.features.tracking.transfer import read_cursor
from orchestrator.features.tracking.uploader import RunUploader
from orchestrator.records.journal import Journal
from orchestrator.records.lease import Lease
from orchestrator.records.output_dir import OutputDir
from orchestrator.runs import main


def test_a_run_arrives_whole_and_a_resume_continues_it(tmp_path, uri):
    run_dir = new_run(tmp_path, uri)
    run_dir.config_file.write_text("seed: 0\n")
    run_dir.log_file(0).write_text("hello\n")
    (run_dir.path / "auto.md").write_text("auto chooses ddp\n")
    (run_dir.path / "auto.json").write_text("{}")
    uploader = RunUploader.start(run_dir, tracking(uri))
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 6))
    wait_for(lambda: read_cursor(run_dir).points == 10)
    assert psutil.Process() not in follower_of(run_dir).parents(), "Ctrl-C and `ray job stop` do not reach the follower"
    assert run_of(uri, run_dir).info.status == "RUNNING"
    log(journal, range(6, 11))
    end(journal, run_dir, steps=10, final_loss=0.1, recovery_s=[1.0], backend="gloo", lost=math.nan)
    upload = uploader.finish(200)
    journal.close()
    assert (upload.missing, upload.uploaded, upload.complete, upload.error) == (0, 20, True, None)

    run = run_of(uri, run_dir)
    assert run.info.run_id == upload.run_id
    assert (run.info.status, run.info.run_name) == ("FINISHED", "digits-ddp")
    assert history(uri, upload.run_id) == expected(run_dir)
    assert run.data.params == {"train.steps": "10", "job.hidden": "x" * 600, "time": "1"}
    assert run.data.tags["strategy"] == "ddp"
    bars = {k: v for k, v in run.data.metrics.items() if k.startswith("summary/")}
    assert math.isnan(bars.pop("summary/lost"))
    assert bars == {"summary/steps": 10.0, "summary/final_loss": 0.1}
    files = {f.path for f in client_of(uri).list_artifacts(upload.run_id)}
    assert files == {"auto.json", "auto.md", "config.yaml", "logs"}
    assert run.info.artifact_uri.startswith(str(tmp_path / "mlartifacts"))
    assert str(tmp_path) not in json.dumps([run.data.params, run.data.tags]), "no machine paths"

    run_dir.update_record(state="running", params={"train.steps": 20, "seed": 0}, tags={"strategy": "single"})
    uploader = RunUploader.start(run_dir, tracking(uri))
    journal = Journal(run_dir)
    wait_for(lambda: run_of(uri, run_dir).info.status == "RUNNING")
    start(journal)
    log(journal, range(8, 16))
    end(journal, run_dir, "FAILED", steps=15)
    second = uploader.finish(200)
    journal.close()
    assert (second.run_id, second.complete) == (upload.run_id, True)
    run = run_of(uri, run_dir)
    assert run.info.status == "FAILED"
    assert [step for step, _ in history(uri, upload.run_id)] == list(range(1, 16))
    assert (run.data.params["train.steps"], run.data.params["seed"]) == ("10", "0")
    assert run.data.tags["strategy"] == "single"
    assert run.data.metrics["summary/steps"] == 15


@pytest.mark.campaign
def test_a_disk_that_is_full_at_the_end_changes_no_result(tmp_path, uri):
    (tmp_path / "outputs").mkdir()
    with mounted(tmp_path / "outputs", "-t", "tmpfs", "-o", "size=2m", "tmpfs"):
        run_dir = new_run(tmp_path, uri)
        run_dir.reserve_space()
        uploader = RunUploader.start(run_dir, tracking(uri))
        journal = Journal(run_dir)
        start(journal)
        log(journal, range(1, 6))
        with (run_dir.path / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        log(journal, range(6, 101))
        with pytest.raises(OSError, match="No space left"):
            run_dir.update_record(state="finished")
        ending = ending_of(run_dir, tracking(uri), uploader, journal, Recorder())
        result = ending.finish(RunResult(status="FINISHED", exit_code=0, run_dir=run_dir.path, summary={"steps": 100}))
        journal.close()
        assert result.exit_code == 0
        record = run_dir.read_record()
        assert (record["state"], record["summary"]["steps"]) == ("finished", 100)
        run = client_of(uri).get_run(record["mlflow_run_id"])
        assert (run.info.status, history(uri, run.info.run_id)) == ("FINISHED", expected(run_dir))
        assert len(expected(run_dir)) == 100


@pytest.fixture
def terminal(monkeypatch):
    """Let this process print to a terminal."""
    master, slave = os.openpty()
    with os.fdopen(master, "rb"), os.fdopen(slave, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        yield


@pytest.mark.parametrize(("waits", "flush_timeout_s"), [("elsewhere", 0.5), *in_campaign(("terminal", 600))])
def test_an_upload_that_takes_longer_than_the_command_waits_goes_on_without_it(
    tmp_path, uri, request, waits, flush_timeout_s
):
    """As on a machine whose CPUs are all busy; here the follower is suspended when the run ends."""
    if waits == "terminal":
        request.getfixturevalue("terminal")
    run_dir = new_run(tmp_path, uri)
    uploader = RunUploader.start(run_dir, tracking(uri, upload_every_s=0.1))
    journal, console = Journal(run_dir), Recorder()
    start(journal)
    log(journal, range(1, 6))
    wait_for(lambda: read_cursor(run_dir).points == 10)
    follower = follower_of(run_dir)
    follower.suspend()
    ending = ending_of(run_dir, tracking(uri, flush_timeout_s=flush_timeout_s), uploader, journal, console)
    ending.finish(RunResult(status="FINISHED", exit_code=0, run_dir=run_dir.path))
    journal.close()
    (ended,) = console.seen
    assert ended.summary["mlflow_missing"] == "the upload goes on in the background"
    assert not any("orchestrator sync" in command for command in ended.next_commands)
    assert pending_runs(OutputDir(tmp_path / "outputs")) == [run_dir]
    before = set(psutil.Process().children())
    assert main(["--output-dir", str(tmp_path / "outputs")]) == 0
    assert set(psutil.Process().children()) <= before, "a command leaves an upload in progress alone"
    follower.resume()
    wait_for(lambda: not pending_runs(OutputDir(tmp_path / "outputs")))
    run = run_of(uri, run_dir)
    assert run.info.status == "FINISHED"
    assert run_dir.read_record()["mlflow_run_id"] == run.info.run_id


def test_a_program_and_a_sweep_wait_for_the_upload_also_at_a_terminal(tmp_path, uri, request):
    """Their next run would train beside it."""
    request.getfixturevalue("terminal")
    run_dir = new_run(tmp_path, uri)
    ending = ending_of(run_dir, tracking(uri, flush_timeout_s=600), None, None, Recorder())
    assert ending._upload_wait_s == PROMPT_WAIT_S
    assert replace(ending, owns_process=False)._upload_wait_s == 600
    assert replace(ending, in_sweep=True)._upload_wait_s == 600


def test_the_next_command_goes_on_with_an_upload_that_was_killed(tmp_path, uri):
    run_dir = new_run(tmp_path, uri)
    uploader = RunUploader.start(run_dir, tracking(uri, upload_every_s=60))
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 6))
    follower = wait_for(lambda: follower_of(run_dir))
    supervisor = follower.parent()
    follower.suspend()
    end(journal, run_dir)
    journal.close()
    uploader.leave()
    supervisor.kill()
    wait_for(lambda: not follower.is_running())
    run_dir.log_file(0).write_text("hello")
    (run_dir.path / ".upload").mkdir()
    (run_dir.path / ".upload" / "rank-1.log").write_text("left")
    damaged = new_run(tmp_path, uri)
    note_pending(damaged)
    damaged.record_file.write_text("{")
    shutil.rmtree(new_run(tmp_path, uri).path)
    assert main(["--output-dir", str(tmp_path / "outputs")]) == 0
    wait_for(lambda: run_dir.read_record().get("mlflow_run_id"))
    run = run_of(uri, run_dir)
    assert (run.info.status, history(uri, run.info.run_id)) == ("FINISHED", expected(run_dir))
    assert pending_runs(OutputDir(tmp_path / "outputs")) == [damaged]
    assert not (run_dir.path / ".upload").exists()


def ending_of(run_dir, config, uploader, journal, console):
    storage = StorageConfig(staging_dir=None, upload_every_s=1, timeout_s=1, flush_timeout_s=0)
    return RunEnding(
        plan=SimpleNamespace(pipeline=None),
        run_dir=run_dir,
        tracking=config,
        uploader=uploader,
        records=RecordUpload(run_dir, Lease(run_dir), storage, Redactor()),
        journal=journal,
        events=EventStream([console], Redactor(), journal=journal),
        resume_command="",
        in_sweep=False,
        owns_process=True,
        origin=HERE,
        redactor=Redactor(),
    )


def test_the_drivers_side_never_imports_mlflow():
    modules = "orchestrator.features.tracking.uploader, orchestrator.sync, sys"
    script = f"import {modules}; assert 'mlflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


def test_without_a_uri_nothing_is_started(tmp_path):
    run_dir = ended_run(tmp_path, None)
    uploader = RunUploader.start(run_dir, tracking(None))
    upload = uploader.finish(10)
    assert (upload.run_id, upload.missing, upload.complete) == (None, 0, True)
    assert not (run_dir.path / "tracking.lock").exists()
