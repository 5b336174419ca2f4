"""The upload of a journal: requests, failures, and masked secrets."""

import os
import shutil
import sqlite3
import tempfile
import time

import pytest

from helpers.machines.disks import mounted
from helpers.records.tracked_runs import (
    artifacts,
    client_of,
    ended_run,
    expected,
    history,
    log,
    new_run,
    run_of,
    save_samples,
)
from orchestrator.features.tracking.mlflow import MlflowBackend, OpenedRun
from orchestrator.features.tracking.transfer import Transfer, read_cursor
from orchestrator.features.tracking.uri import absolute_uri, validate_uri
from orchestrator.protocol.events import Continued, MetricsLogged, SampleSaved
from orchestrator.records.ended_runs import final_ending
from orchestrator.records.journal import Ending, Journal


class MemoryBackend:
    """A tracking server that fails where it is told to."""

    uri = "http://localhost"
    max_points_per_request = 3

    def __init__(self):
        self.calls = []
        self.failing = None

    def _call(self, name, value):
        if self.failing == name:
            raise ConnectionError(f"{name} failed")
        self.calls.append((name, value))

    def open_run(self, record, *, run_id, start_time, running):
        self._call("open", running)
        return OpenedRun(record["uid"], None)

    def discard_run(self, run_id):
        self._call("discard", run_id)

    def log_points(self, run_id, points):
        self._call("log", [(p.name, p.step) for p in points])

    def log_sample(self, run_id, sample):
        self._call("sample", (sample.name, sample.step))

    def close_run(self, run_id, record, ending):
        self._call("close", ending.status)

    def log_file(self, run_id, file, folder):
        self._call("file", f"{folder}/{file.name}".lstrip("/"))

    def log_model(self, run_id, folder):
        self._call("model", folder)

    def log_sweep(self, run_id, sweep, files):
        self._call("sweep", [file.name for file in files])

    def describe(self, error):
        return f"{type(error).__name__}: {error}"


def test_the_upload_needs_no_more_of_a_server_than_the_protocol(tmp_path):
    run_dir = ended_run(tmp_path, "http://localhost")
    backend = MemoryBackend()
    transfer = Transfer(run_dir, backend)
    transfer.push(None)
    assert backend.calls[0] == ("open", True)
    assert [len(points) for name, points in backend.calls if name == "log"] == [2] * 10
    backend.failing = "close"
    ending = Ending(status="FINISHED", time=time.time(), summary={})
    with pytest.raises(ConnectionError):
        transfer.push(ending)
    assert read_cursor(run_dir).error == "ConnectionError: close failed"
    backend.calls, backend.failing = [], None
    transfer.push(ending)
    assert backend.calls == [("open", False), ("close", "FINISHED")]
    assert read_cursor(run_dir).error is None


def test_a_store_that_refuses_files_still_gets_the_points_and_the_status(tmp_path):
    run_dir = ended_run(tmp_path, "http://localhost")
    journal = Journal(run_dir)
    save_samples(journal, run_dir, 5, 10)
    journal.close()
    backend = MemoryBackend()
    backend.failing = "sample"
    transfer = Transfer(run_dir, backend)
    ending = Ending(status="FINISHED", time=time.time(), summary={})
    with pytest.raises(ConnectionError):
        transfer.push(ending)
    assert backend.calls[-1] == ("close", "FINISHED")
    assert read_cursor(run_dir).closed_at is None, "something is missing"
    backend.calls, backend.failing = [], None
    transfer.push(ending)
    samples = [("sample", (name, step)) for step in (5, 10) for name in ("digits", "says")]
    assert backend.calls == [("open", False), ("close", "FINISHED"), *samples]
    backend.calls = []
    transfer.push(ending)
    assert backend.calls == [], "everything is there"
    assert read_cursor(run_dir).closed_at == ending.time


def test_a_file_that_finds_no_room_holds_up_neither_the_end_of_a_run_nor_other_files(tmp_path):
    (tmp_path / "outputs").mkdir()
    with mounted(tmp_path / "outputs", "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        run_dir = ended_run(tmp_path, "http://localhost")
        for rank, size_bytes in enumerate((1000, 1_600_000, 1000)):
            run_dir.log_file(rank).write_text("x" * size_bytes)
        filler = run_dir.path / "filler"
        filler.write_bytes(bytes(2_000_000))
        backend = MemoryBackend()
        transfer = Transfer(run_dir, backend)
        with pytest.raises(OSError, match="No space left"):
            transfer.push(final_ending(run_dir))
        calls = [call for call in backend.calls if call[0] in ("close", "file")]
        assert calls[0] == ("close", "FINISHED")
        assert sorted(calls[1:]) == [("file", "logs/rank-0.log"), ("file", "logs/rank-2.log")]
        assert "No space left" in read_cursor(run_dir).error
        assert read_cursor(run_dir).closed_at is None, "something is missing"
        filler.unlink()
        backend.calls = []
        transfer.push(final_ending(run_dir))
        assert [call for call in backend.calls if call[0] == "file"] == [("file", "logs/rank-1.log")]
        assert [path for path in run_dir.path.iterdir() if path.name.startswith(".upload")] == []


def test_the_upload_needs_no_room_for_temporary_files_elsewhere(tmp_path, uri, monkeypatch):
    run_dir = ended_run(tmp_path, uri, plan={"mesh": {"data_parallel_size": 2, "pipeline_parallel_size": 1}})
    run_dir.log_file(0).write_text("hello")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    transfer = Transfer(run_dir, MlflowBackend(uri, request_timeout_s=5))
    transfer.push(final_ending(run_dir))
    assert run_of(uri, run_dir).info.status == "FINISHED"
    assert artifacts(uri, transfer.cursor.run_id, "logs") == ["logs/rank-0.log"]
    assert "plan.json" in artifacts(uri, transfer.cursor.run_id, "")


def test_files_outside_the_run_directory_are_neither_uploaded_nor_changed(tmp_path):
    """The directory may come from somebody else."""
    run_dir = ended_run(tmp_path, "http://localhost")
    outside = tmp_path / "outside.txt"
    outside.write_text("private")
    run_dir.log_file(7).symlink_to(outside)
    journal = Journal(run_dir)
    upwards = os.path.relpath(outside, run_dir.path)
    for path in (upwards, str(outside), "logs/rank-7.log", f"../{outside.name}"):
        journal.emit(SampleSaved(step=5, name="says", path=path))
    journal.close()
    (run_dir.path.parent / outside.name).write_text("private too")
    backend = MemoryBackend()
    Transfer(run_dir, backend).push(final_ending(run_dir))
    assert [name for name, _ in backend.calls if name == "sample"] == []
    assert [name for name, _ in backend.calls if name == "file"] == []
    assert outside.read_text() == "private"


def test_more_than_one_request_of_points(tmp_path, uri):
    run_dir = new_run(tmp_path, uri)
    journal = Journal(run_dir)
    journal.emit(MetricsLogged(step=1, metrics={f"m/{i}": float(i) for i in range(1500)}))
    log(journal, range(2, 1002))
    journal.close()
    transfer = Transfer(run_dir, MlflowBackend(uri, request_timeout_s=5))
    transfer.push(Ending(status="FINISHED", time=time.time(), summary={}))
    assert transfer.cursor.points == 3500
    assert history(uri, transfer.cursor.run_id) == expected(run_dir)
    assert len(run_of(uri, run_dir).data.metrics) == 1502


def test_mlflow_shows_the_curve_of_the_last_attempt_alone(tmp_path, uri):
    run_dir = new_run(tmp_path, uri)
    journal = Journal(run_dir)
    transfer = Transfer(run_dir, MlflowBackend(uri, request_timeout_s=5))
    log(journal, range(1, 8))
    save_samples(journal, run_dir, 3, 6)
    transfer.push(None)
    discarded = transfer.cursor.run_id
    for attempt in (1.5, 2.5):
        journal.emit(Continued(step=4))
        for step in (6, 8):  # logs other steps than before
            journal.emit(MetricsLogged(step=step, metrics={"train/loss": attempt}))
        transfer.push(None)
        transfer.push(None)
    journal.emit(Continued(step=8))  # repeats nothing
    journal.close()
    kept = transfer.cursor.run_id
    transfer.push(Ending(status="FINISHED", time=time.time(), summary={}))
    assert transfer.cursor.run_id == kept
    steps_and_losses = [*((step, 1 / step) for step in range(1, 5)), (6, 2.5), (8, 2.5)]
    assert history(uri, kept) == expected(run_dir) == steps_and_losses
    assert run_of(uri, run_dir).info.run_id == kept
    assert artifacts(uri, kept, "samples") == ["samples/step-000003-says.txt"]
    old = client_of(uri).get_run(discarded)
    assert (old.info.lifecycle_stage, old.info.run_name) == (
        "deleted",
        "digits-ddp (discarded: the run has repeated steps)",
    )


def test_texts_that_a_store_cannot_take_hold_up_no_run(tmp_path, uri):
    bad = "/data/b\udcffse\0.bin"
    run_dir = ended_run(
        tmp_path,
        uri,
        "FAILED",
        description=f"No such file: {bad}",
        command=f"launch job.path={bad}",
        params={
            "job.path": bad,
            "job.class_weight.猫": 1.0,
            "job.class_weight.狗": 2.0,
            f"job.{'x' * 300}": bad * 2000,
        },
        tags={"strategy": "ddp", "job": bad * 2000},
        source={"source.name": bad},
        sweep={"id": "abc", "name": f"job.path={bad}"},
    )
    run_dir.log_file(0).write_bytes(os.fsencode(bad[:13]))
    transfer = Transfer(run_dir, MlflowBackend(uri, request_timeout_s=5))
    transfer.push(final_ending(run_dir))
    run = run_of(uri, run_dir)
    assert run.info.status == "FAILED"
    assert "No such file: /data/b�se�.bin" in run.data.tags["mlflow.note.content"]
    assert run.data.params["job.path"] == "/data/b�se�.bin"
    weights = {name: value for name, value in run.data.params.items() if "class_weight" in name}
    assert weights == {"job.class_weight._x732b_": "1", "job.class_weight._x72d7_": "2"}
    assert artifacts(uri, run.info.run_id, "logs") == ["logs/rank-0.log"]


@pytest.mark.parametrize("name", ["a%20b", "a?b=c", "a#b", "größe 猫", 'it\'s "q"'])
def test_mlflow_gets_a_run_in_a_directory_of_any_name(tmp_path, empty_database, name):
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(empty_database, folder / "mlflow.db")
    uri = absolute_uri("sqlite:///mlflow.db", folder)
    assert validate_uri(uri) is None
    run_dir = ended_run(folder, uri)
    run_dir.log_file(0).write_text("hello")
    Transfer(run_dir, MlflowBackend(uri, request_timeout_s=5)).push(final_ending(run_dir))
    run = run_of(uri, run_dir)
    assert history(uri, run.info.run_id) == expected(run_dir)
    assert artifacts(uri, run.info.run_id, "logs") == ["logs/rank-0.log"]
    (stored,) = folder.glob("mlartifacts/**/rank-0.log")
    assert stored.read_text() == "hello"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with sqlite3.connect(folder / "mlflow.db") as database:
        assert database.execute("select count(*) from runs").fetchone() == (1,)


def test_secrets_are_masked_in_what_is_uploaded(tmp_path, uri, monkeypatch):
    monkeypatch.setenv("SOME_API_TOKEN", "from-environment")
    run_dir = ended_run(tmp_path, uri, command="launch job.password=short job.text=given-secret")
    text = "given-secret and from-environment, password=x\n"
    run_dir.log_file(0).write_text(text)
    picture = b"\x89PNG\0 given-secret"
    run_dir.profile.mkdir()
    (run_dir.profile / "picture.png").write_bytes(picture)
    transfer = Transfer(run_dir, MlflowBackend(uri, request_timeout_s=5), secrets=["given-secret"])
    transfer.push(final_ending(run_dir))
    (log_file,) = tmp_path.glob("mlartifacts/**/rank-0.log")
    assert log_file.read_text() == "*** and ***, password=***\n"
    (uploaded,) = tmp_path.glob("mlartifacts/**/picture.png")
    assert uploaded.read_bytes() == picture, "a file that is not text is uploaded as it is"
    assert run_of(uri, run_dir).data.tags["mlflow.note.content"] == "`launch job.password=*** job.text=***`"
    assert run_dir.log_file(0).read_text() == text
