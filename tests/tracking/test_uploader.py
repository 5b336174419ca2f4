"""The upload to MLflow, with real stores, a real server, real followers and a network that fails."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from PIL import Image

from helpers.disks import mounted
from orchestrator import sync
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import StorageConfig, TrackingConfig
from orchestrator.driver.ending import RunEnding
from orchestrator.driver.run import RunResult
from orchestrator.driver.uploads import RecordUpload
from orchestrator.protocol.events import MetricsLogged, RunEnded, RunStarted, SampleSaved
from orchestrator.records import run_dir as rundir
from orchestrator.records.journal import Ending, Journal, Sample, read_metrics
from orchestrator.records.lease import Lease
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.process import this_process
from orchestrator.tracking.backend import Point
from orchestrator.tracking.mlflow import MlflowBackend, connect
from orchestrator.tracking.transfer import Transfer, exclusive, final_ending, read_cursor
from orchestrator.tracking.uploader import Uploader, recover_orphans

PASSWORD = "correct-horse"


class Proxy:
    """A TCP proxy on the way to a server that can refuse, answer late, or lose answers."""

    def __init__(self, target_port):
        self.mode = "pass"
        self.delay_s = 0.0
        self.requests = 0
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with contextlib.suppress(OSError), client, socket.create_connection(self._target) as server:
            threading.Thread(target=self._answers, args=(server, client), daemon=True).start()
            while data := client.recv(65536):
                self.requests += 1
                if self.mode == "refuse":
                    break
                server.sendall(data)
            for end in (server, client):
                end.shutdown(socket.SHUT_RDWR)

    def _answers(self, server, client):
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                time.sleep(self.delay_s)
                if self.mode == "lose answers":
                    client.shutdown(socket.SHUT_RDWR)
                else:
                    client.sendall(data)


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory):
    """Making MLflow's tables takes seconds: once, and every test copies them."""
    path = tmp_path_factory.mktemp("database") / "mlflow.db"
    connect(f"sqlite:///{path}", request_timeout_s=10).search_experiments()
    return path


@pytest.fixture
def uri(empty_database, tmp_path):
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture(scope="module")
def server_port(empty_database, tmp_path_factory):
    """A real MLflow server."""
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_database, folder / "mlflow.db")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=log,
            stderr=log,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
            start_new_session=True,
        )
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), timeout_s=60)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=20)


@pytest.fixture
def proxy(server_port):
    proxy = Proxy(server_port)
    yield proxy
    proxy.close()


def answers(url):
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(url, timeout=1).status == 200


def wait_until(condition, *, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return result


def tracking(uri, *, flush_timeout_s=30.0, request_timeout_s=5.0, upload_every_s=0.0):
    return TrackingConfig(
        uri=uri,
        experiment="tests",
        request_timeout_s=request_timeout_s,
        upload_every_s=upload_every_s,
        flush_timeout_s=flush_timeout_s,
        system_metrics_every_s=0,
    )


def new_run(tmp_path, uri, *, name="digits-ddp", sweep=None, **record):
    run_dir = rundir.create(tmp_path / "outputs", name)
    values = {
        "uid": uuid.uuid4().hex,
        "name": name,
        "state": "running",
        "driver": this_process(),
        "params": {"train.steps": 10, "job.hidden": "x" * 600, "time": 1},
        "tags": {"strategy": "ddp", "world_size": "2"},
        "tracking": {"uri": uri, "experiment": "tests", "request_timeout_s": 5.0, "flush_timeout_s": 30.0},
        "sweep": sweep,
    }
    run_dir.update_record(**{**values, **record})
    return run_dir


def start(journal, name="digits-ddp"):
    journal.emit(RunStarted(name=name, run_dir="", strategy="ddp", job="digits", world_size=2, steps=10))


def log(journal, steps):
    for step in steps:
        journal.emit(MetricsLogged(step=step, metrics={"train/loss": 1 / step, "perf/step_ms": 5.0}))


def save_samples(journal, run_dir, *steps):
    """An image and a text at each step."""
    run_dir.samples.mkdir(exist_ok=True)
    for step in steps:
        image, text = run_dir.sample_file(step, "digits", "png"), run_dir.sample_file(step, "says", "txt")
        Image.new("RGB", (300, 600), (step, 0, 0)).save(image)
        text.write_text(f"step {step}")
        for name, path in (("digits", image), ("says", text)):
            journal.emit(SampleSaved(step=step, name=name, path=str(path.relative_to(run_dir.path))))


def end(journal, run_dir, status="FINISHED", **summary):
    run_dir.update_record(state=status.lower(), summary=summary)
    journal.emit(RunEnded(status=status, exit_code=0, reason="", summary=summary))


def ended_run(tmp_path, uri, status="FINISHED", **kwargs):
    """A run that is over, of which MLflow has nothing."""
    run_dir = new_run(tmp_path, uri, **kwargs)
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 11))
    end(journal, run_dir, status, final_loss=0.1)
    journal.close()
    return run_dir


def client_of(uri):
    return connect(uri, request_timeout_s=10)


def run_of(uri, run_dir):
    """The run of MLflow, which there must be exactly once."""
    client = client_of(uri)
    experiment = client.get_experiment_by_name("tests")
    uid = run_dir.read_record()["uid"]
    found = client.search_runs([experiment.experiment_id], f"tags.`orchestrator.run_uid` = '{uid}'")
    assert len(found) == 1
    return found[0]


def history(uri, run_id, name="train/loss"):
    return [(m.step, m.value) for m in client_of(uri).get_metric_history(run_id, name)]


def expected(run_dir, name="train/loss"):
    return [(step, metrics[name]) for step, _, metrics in read_metrics(run_dir) if name in metrics]


def files_with(run_dir, text):
    files = [p for p in run_dir.path.rglob("*") if p.is_file()]
    assert len(files) >= 4
    return [p for p in files if text in p.read_text()]


def test_a_run_arrives_whole_and_a_resume_continues_it(tmp_path, uri):
    run_dir = new_run(tmp_path, uri)
    run_dir.config_file.write_text("seed: 0\n")
    run_dir.log_file(0).write_text("hello\n")
    uploader = Uploader.start(run_dir, tracking(uri))
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 6))
    wait_until(lambda: read_cursor(run_dir).points == 10)
    children = psutil.Process().children(recursive=True)
    assert all(c.status() == "zombie" for c in children), "the follower is nobody's child"
    assert run_of(uri, run_dir).info.status == "RUNNING"
    log(journal, range(6, 11))
    end(journal, run_dir, steps=10, final_loss=0.1, recovery_s=[1.0], backend="gloo", lost=math.nan)
    upload = uploader.finish(30)
    journal.close()
    assert (upload.missing, upload.uploaded, upload.complete, upload.error) == (0, 20, True, None)

    run = run_of(uri, run_dir)
    assert run.info.run_id == upload.run_id
    assert (run.info.status, run.info.run_name) == ("FINISHED", "digits-ddp")
    assert history(uri, upload.run_id) == expected(run_dir)
    assert run.data.params == {"train.steps": "10", "job.hidden": "x" * 500, "time": "1"}
    assert run.data.tags["strategy"] == "ddp"
    bars = {k: v for k, v in run.data.metrics.items() if k.startswith("summary/")}
    assert math.isnan(bars.pop("summary/lost"))
    assert bars == {"summary/steps": 10.0, "summary/final_loss": 0.1}
    files = {f.path for f in client_of(uri).list_artifacts(upload.run_id)}
    assert files == {"config.yaml", "logs"}
    assert run.info.artifact_uri.startswith(str(tmp_path / "mlartifacts"))
    assert str(tmp_path) not in json.dumps([run.data.params, run.data.tags]), "no machine paths"

    run_dir.update_record(state="running", params={"train.steps": 20, "seed": 0}, tags={"strategy": "single"})
    uploader = Uploader.start(run_dir, tracking(uri))
    journal = Journal(run_dir)
    wait_until(lambda: run_of(uri, run_dir).info.status == "RUNNING")
    start(journal)
    log(journal, range(8, 16))
    end(journal, run_dir, "FAILED", steps=15)
    second = uploader.finish(30)
    journal.close()
    assert (second.run_id, second.complete) == (upload.run_id, True)
    run = run_of(uri, run_dir)
    assert run.info.status == "FAILED"
    assert [step for step, _ in history(uri, upload.run_id)] == list(range(1, 16))
    assert (run.data.params["train.steps"], run.data.params["seed"]) == ("10", "0")
    assert run.data.tags["strategy"] == "single"
    assert run.data.metrics["summary/steps"] == 15


def test_no_point_is_lost_or_doubled_whatever_the_server_does(tmp_path, proxy, server_port):
    uri = f"http://me:{PASSWORD}@127.0.0.1:{proxy.port}"
    run_dir = new_run(tmp_path, f"http://***@127.0.0.1:{proxy.port}")
    journal = Journal(run_dir)
    start(journal)
    proxy.mode = "refuse"
    uploader = Uploader.start(run_dir, tracking(uri))
    log(journal, range(1, 100))
    assert "MlflowException" in wait_until(uploader.problem)
    assert not files_with(run_dir, PASSWORD)
    proxy.mode = "pass"
    wait_until(lambda: read_cursor(run_dir).points == 2 * 99)
    assert uploader.problem() is None

    for mode, steps in (("refuse", range(100, 150)), ("lose answers", range(150, 200))):
        proxy.mode = mode
        log(journal, steps)
        wait_until(uploader.problem)
        assert read_cursor(run_dir).points == 2 * (steps.start - 1), "unconfirmed points do not count"
        proxy.mode = "pass"
        wait_until(lambda all_points=2 * (steps.stop - 1): read_cursor(run_dir).points == all_points)

    log(journal, range(200, 300))
    end(journal, run_dir, steps=299)
    upload = uploader.finish(30)
    assert (upload.missing, upload.complete) == (0, True)
    direct = f"http://127.0.0.1:{server_port}"
    assert run_of(direct, run_dir).info.status == "FINISHED"
    for name in ("train/loss", "perf/step_ms"):
        assert history(direct, upload.run_id, name) == expected(run_dir, name)
    assert not files_with(run_dir, PASSWORD)


def test_a_slow_server_delays_nothing_and_sync_uploads_the_rest(tmp_path, proxy, server_port, capsys):
    uri = f"http://127.0.0.1:{proxy.port}"
    run_dir = new_run(tmp_path, uri)
    proxy.delay_s = 60.0
    uploader = Uploader.start(run_dir, tracking(uri, request_timeout_s=60.0))
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 2))
    wait_until(lambda: proxy.requests > 0)
    log(journal, range(2, 501))
    end(journal, run_dir)
    upload = uploader.finish(0.5)
    assert read_cursor(run_dir).points == 0, "the run ended before the server's first answer"
    assert (upload.missing, upload.complete) == (1000, False)

    proxy.mode = "refuse"
    assert sync.main([str(run_dir.path)]) == 1
    message = capsys.readouterr().err
    assert "1000 points are not uploaded" in message
    assert f"python -m orchestrator.sync {run_dir.path}" in message
    proxy.mode, proxy.delay_s = "pass", 0.0
    assert sync.main([str(run_dir.path)]) == 0
    assert capsys.readouterr().out == f"uploaded 1000 points; all 1000 are on {uri}\n"
    run = run_of(uri, run_dir)
    assert run.info.status == "FINISHED"
    assert run_dir.read_record()["mlflow_run_id"] == run.info.run_id
    assert history(uri, run.info.run_id) == expected(run_dir)
    assert sync.main([str(run_dir.path)]) == 0
    assert capsys.readouterr().out.startswith("uploaded 0 points; all 1000")


def follower_of(run_dir):
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(ProcessLookupError):  # the one that detached it ends meanwhile
            ours = str(run_dir.path) in (process.info["cmdline"] or ())
            if ours and os.sched_getscheduler(process.pid) == os.SCHED_IDLE:
                return process
    return None


def test_a_follower_yields_the_cpu_waits_for_points_and_ends_in_time_when_left_alone(tmp_path):
    run_dir = new_run(tmp_path, uri := "http://127.0.0.1:9")  # nothing listens there
    uploader = Uploader.start(run_dir, tracking(uri, flush_timeout_s=3.0))
    journal = Journal(run_dir)
    start(journal)
    follower = wait_until(lambda: follower_of(run_dir))
    assert follower.nice() == 19
    time.sleep(1.5)
    assert sum(follower.cpu_times()[:2]) < 0.7, "MLflow's import must not compete with the start of a run"
    log(journal, range(1, 4))
    wait_until(uploader.problem)
    end(journal, run_dir, "KILLED")
    journal.close()
    uploader.leave()
    with exclusive(run_dir) as free:
        assert not free, "it still works"
    with exclusive(run_dir, timeout_s=6) as free:
        assert free, "it has ended"


def test_a_run_shorter_than_the_upload_interval_is_uploaded_at_its_end(tmp_path, uri):
    run_dir = new_run(tmp_path, uri)
    uploader = Uploader.start(run_dir, tracking(uri, upload_every_s=60))
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 4))
    follower = wait_until(lambda: follower_of(run_dir))
    time.sleep(2.5)
    assert sum(follower.cpu_times()[:2]) < 0.7, "MLflow's import must not compete with the training"
    assert uploader.problem() is None
    end(journal, run_dir)
    journal.close()
    upload = uploader.finish(30)
    assert (upload.uploaded, upload.missing, upload.complete) == (6, 0, True)


def test_a_follower_that_dies_is_reported_and_replaced(tmp_path, uri):
    run_dir = new_run(tmp_path, uri)
    uploader = Uploader.start(run_dir, tracking(uri))
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 4))
    wait_until(lambda: read_cursor(run_dir).points == 6)
    wait_until(lambda: follower_of(run_dir)).kill()
    assert "died; another one continues" in wait_until(uploader.problem)
    log(journal, range(4, 7))
    wait_until(lambda: read_cursor(run_dir).points == 12)
    assert uploader.problem() is None
    wait_until(lambda: follower_of(run_dir)).kill()
    end(journal, run_dir)
    journal.close()
    time.sleep(0.2)
    upload = uploader.finish(30)
    assert (upload.uploaded, upload.missing, upload.complete) == (12, 0, True)


DRIVER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from orchestrator.config.schema import StorageConfig, TrackingConfig
from orchestrator.protocol.events import MetricsLogged, RunStarted
from orchestrator.records.process import this_process
from orchestrator.records.run_dir import RunDir
from orchestrator.records.journal import Journal
from orchestrator.tracking.uploader import Uploader

run_dir = RunDir(Path(sys.argv[1]))
run_dir.update_record(driver=this_process())
journal = Journal(run_dir)
tracking = TrackingConfig(
    uri=sys.argv[2],
    experiment="tests",
    request_timeout_s=5,
    upload_every_s=0,
    flush_timeout_s=30,
    system_metrics_every_s=0,
)
uploader = Uploader.start(run_dir, tracking)
journal.emit(RunStarted(name="n", run_dir="", strategy="ddp", job="digits", world_size=2, steps=9))
for step in (1, 2, 3):
    journal.emit(MetricsLogged(step=step, metrics={"train/loss": 1 / step}))
print("ready", flush=True)
time.sleep(60)
"""


def test_kill_minus_nine_of_the_driver_ends_as_killed(tmp_path, uri):
    run_dir = new_run(tmp_path, uri)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(run_dir.path), uri], stdout=subprocess.PIPE, start_new_session=True
    )
    driver.stdout.readline()
    wait_until(lambda: read_cursor(run_dir).run_id)
    os.killpg(driver.pid, signal.SIGKILL)  # with all that would die with it
    wait_until(lambda: run_dir.read_record()["state"] == "killed", timeout_s=5)
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


def test_orphans_of_a_dead_machine_are_marked_at_once_and_mended_in_the_background(tmp_path, uri):
    dead = {**this_process(), "pid": 2**22 - 1}
    orphan = new_run(tmp_path, uri, driver=dead)
    journal = Journal(orphan)
    start(journal)
    log(journal, range(1, 4))
    journal.close()
    alive = new_run(tmp_path, uri)
    followed = new_run(tmp_path, uri, driver=dead)
    ended_run(tmp_path, uri, driver=dead)
    for _ in range(50):
        new_run(tmp_path, uri, state="finished")
    with exclusive(followed):
        assert [r.path for r in recover_orphans(OutputDir(tmp_path / "outputs"))] == [orphan.path]
        assert not read_cursor(orphan).closed_at, "the upload is not waited for"
    assert orphan.read_record()["state"] == "killed"
    assert alive.read_record()["state"] == followed.read_record()["state"] == "running"
    wait_until(lambda: read_cursor(orphan).closed_at)
    with exclusive(orphan, timeout_s=20) as ended:
        assert ended
    run = run_of(uri, orphan)
    assert (run.info.status, len(history(uri, run.info.run_id))) == ("KILLED", 3)


def test_a_disk_that_is_full_at_the_end_changes_no_result(tmp_path, uri):
    (tmp_path / "outputs").mkdir()
    with mounted(tmp_path / "outputs", "-t", "tmpfs", "-o", "size=2m", "tmpfs"):
        run_dir = new_run(tmp_path, uri)
        run_dir.reserve_space()
        uploader = Uploader.start(run_dir, tracking(uri))
        journal = Journal(run_dir)
        start(journal)
        log(journal, range(1, 6))
        with (run_dir.path / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        log(journal, range(6, 101))
        with pytest.raises(OSError, match="No space left"):
            run_dir.update_record(state="finished")
        storage = StorageConfig(staging_dir=None, upload_every_s=1, timeout_s=1, flush_timeout_s=0)
        ending = RunEnding(
            plan=SimpleNamespace(pipeline=None),
            run_dir=run_dir,
            tracking=tracking(uri),
            uploader=uploader,
            records=RecordUpload(run_dir, Lease(run_dir), storage, Redactor()),
            journal=journal,
            console=Journal(rundir.create(tmp_path, "console")),
            resume_command="",
            redactor=Redactor(),
        )
        result = ending.finish(RunResult(status="FINISHED", exit_code=0, run_dir=run_dir.path, summary={"steps": 100}))
        journal.close()
        assert result.exit_code == 0
        record = run_dir.read_record()
        assert (record["state"], record["summary"]["steps"]) == ("finished", 100)
        run = client_of(uri).get_run(record["mlflow_run_id"])
        assert (run.info.status, history(uri, run.info.run_id)) == ("FINISHED", expected(run_dir))
        assert len(expected(run_dir)) == 100


def test_any_number_of_orphans_is_uploaded_by_one_process(tmp_path, uri):
    dead = {**this_process(), "pid": 2**22 - 1}
    orphans = [new_run(tmp_path, uri, driver=dead) for _ in range(6)]
    assert len(recover_orphans(OutputDir(tmp_path / "outputs"))) == 6
    wait_until(lambda: all(read_cursor(orphan).closed_at for orphan in orphans))
    assert {run_of(uri, orphan).info.status for orphan in orphans} == {"KILLED"}
    with exclusive(orphans[0], timeout_s=20) as ended:
        assert ended


def test_the_drivers_side_never_imports_mlflow():
    script = "import orchestrator.tracking.uploader, orchestrator.sync, sys; assert 'mlflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


def test_without_a_uri_nothing_is_started(tmp_path):
    run_dir = ended_run(tmp_path, None)
    uploader = Uploader.start(run_dir, tracking(None))
    upload = uploader.finish(10)
    assert (upload.run_id, upload.missing, upload.complete) == (None, 0, True)
    assert not (run_dir.path / "tracking.lock").exists()


def test_runs_of_a_sweep_are_children_and_the_parent_ends_as_the_worst(tmp_path, uri):
    sweep = {"id": uuid.uuid4().hex, "name": "single-or-ddp"}
    runs = [ended_run(tmp_path, uri, status, sweep=sweep) for status in ("FINISHED", "FAILED", "FINISHED")]
    for run_dir, parent_status in zip(runs, ("FINISHED", "FAILED", "FAILED"), strict=True):
        assert sync.main([str(run_dir.path)]) == 0
        parent_id = run_of(uri, run_dir).data.tags["mlflow.parentRunId"]
        parent = client_of(uri).get_run(parent_id)
        assert (parent.info.run_name, parent.info.status) == ("single-or-ddp", parent_status)
    parents = {run_of(uri, r).data.tags["mlflow.parentRunId"] for r in runs}
    assert len(parents) == 1


def test_a_run_that_the_server_has_lost_is_uploaded_again(tmp_path, uri, empty_database):
    run_dir = ended_run(tmp_path, uri)
    assert sync.main([str(run_dir.path)]) == 0
    first = run_of(uri, run_dir).info.run_id
    shutil.copy(empty_database, tmp_path / "other.db")
    other = f"sqlite:///{tmp_path / 'other.db'}"
    assert sync.main([str(run_dir.path), "--uri", other]) == 0
    assert history(other, run_of(other, run_dir).info.run_id) == expected(run_dir)
    client_of(other).delete_run(run_of(other, run_dir).info.run_id)
    assert sync.main([str(run_dir.path), "--uri", other]) == 0
    assert history(other, run_of(other, run_dir).info.run_id) == expected(run_dir)
    assert sync.main([str(run_dir.path)]) == 0
    assert run_of(uri, run_dir).info.run_id == first
    assert history(uri, first) == expected(run_dir)


def test_the_same_batch_twice_leaves_each_point_once(uri):
    """What the whole upload relies on: MLflow's store knows an equal point again."""
    client = client_of(uri)
    run_id = client.create_run(client.create_experiment("twice")).info.run_id
    values = [(0.5, 1000.0, 1), (math.nan, 1001.0, 2), (math.inf, 1002.0, 3), (0.25, 1003.0, 4)]
    points = [Point("a", value, at, step) for value, at, step in values]
    backend = MlflowBackend(uri, request_timeout_s=10)
    backend.log_points(run_id, points[:3])
    backend.log_points(run_id, points)
    assert [step for step, _ in history(uri, run_id, "a")] == [1, 2, 3, 4]


def artifacts(uri, run_id, folder):
    return sorted(f.path for f in client_of(uri).list_artifacts(run_id, folder))


def test_an_image_is_stored_as_mlflow_stores_its_own_and_the_same_twice_is_one(tmp_path, uri):
    run_dir = new_run(tmp_path, uri)
    journal = Journal(run_dir)
    save_samples(journal, run_dir, 7)
    journal.close()
    client = client_of(uri)
    experiment = client.create_experiment("images", artifact_location=str(tmp_path / "images"))
    ours, theirs = (client.create_run(experiment).info.run_id for _ in range(2))
    image = Sample(name="digits", step=7, time=1700000000.25, path=run_dir.sample_file(7, "digits", "png"))
    for _ in range(2):
        MlflowBackend(uri, request_timeout_s=10).log_sample(ours, image)
    client.log_image(theirs, Image.open(image.path), key="digits", step=7, timestamp=1700000000250)
    named = [
        [re.sub(r"[0-9a-f]{8}(-[0-9a-f]+)+", "<uuid>", path) for path in artifacts(uri, r, "images")]
        for r in (ours, theirs)
    ]
    assert (
        named[0]
        == named[1]
        == [f"images/digits+step+7+timestamp+1700000000250+<uuid>{end}" for end in ("+compressed.webp", ".png")]
    )
    sizes = [
        [Image.open(path).size for path in sorted((tmp_path / "images" / r / "artifacts" / "images").iterdir())]
        for r in (ours, theirs)
    ]
    assert sizes[0] == sizes[1] == [(128, 256), (300, 600)]
    tags = [client.get_run(run_id).data.tags["mlflow.loggedImages"] for run_id in (ours, theirs)]
    assert tags[0] == tags[1]


def test_samples_arrive_once_whatever_the_server_does(tmp_path, proxy, server_port):
    uri = f"http://127.0.0.1:{proxy.port}"
    run_dir = new_run(tmp_path, uri)
    journal = Journal(run_dir)
    start(journal)
    uploader = Uploader.start(run_dir, tracking(uri))
    log(journal, [10])
    save_samples(journal, run_dir, 10)
    wait_until(lambda: read_cursor(run_dir).samples_offset == run_dir.events_file.stat().st_size)
    proxy.mode = "lose answers"
    save_samples(journal, run_dir, 20, 30)
    wait_until(uploader.problem)
    proxy.mode = "pass"
    journal.emit(SampleSaved(step=40, name="deleted", path="samples/step-000040-deleted.txt"))
    end(journal, run_dir, steps=40)
    upload = uploader.finish(30)
    journal.close()
    assert (upload.complete, upload.error) == (True, None)
    direct = f"http://127.0.0.1:{server_port}"
    assert artifacts(direct, upload.run_id, "samples") == [f"samples/step-0000{step}-says.txt" for step in (10, 20, 30)]
    images = artifacts(direct, upload.run_id, "images")
    assert [path.split("+timestamp")[0] for path in images] == [
        f"images/digits+step+{s}" for s in (10, 10, 20, 20, 30, 30)
    ]


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
        return record["uid"]

    def log_points(self, run_id, points):
        self._call("log", [(p.name, p.step) for p in points])

    def log_sample(self, run_id, sample):
        self._call("sample", (sample.name, sample.step))

    def close_run(self, run_id, record, ending, run_dir):
        self._call("close", ending.status)


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


def test_secrets_are_masked_in_what_is_uploaded(tmp_path, uri, monkeypatch):
    monkeypatch.setenv("SOME_API_TOKEN", "from-environment")
    run_dir = ended_run(tmp_path, uri, command="launch job.password=short job.text=given-secret")
    text = "given-secret and from-environment, password=x\n"
    run_dir.log_file(0).write_text(text)
    picture = b"\x89PNG\0 given-secret"
    run_dir.timeline_picture.write_bytes(picture)
    transfer = Transfer(run_dir, MlflowBackend(uri, request_timeout_s=5), secrets=["given-secret"])
    transfer.push(final_ending(run_dir))
    (log_file,) = tmp_path.glob("mlartifacts/**/rank-0.log")
    assert log_file.read_text() == "*** and ***, password=***\n"
    (uploaded,) = tmp_path.glob("mlartifacts/**/timeline.png")
    assert uploaded.read_bytes() == picture, "a file that is not text is uploaded as it is"
    assert run_of(uri, run_dir).data.tags["mlflow.note.content"] == "`launch job.password=*** job.text=***`"
    assert run_dir.log_file(0).read_text() == text


def test_sync_of_a_run_whose_driver_was_killed(tmp_path, uri, capsys):
    run_dir = new_run(tmp_path, uri, driver={**this_process(), "pid": 2**22 - 1})
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 4))
    journal.close()
    assert sync.main([str(run_dir.path)]) == 0
    assert "all 6 are on" in capsys.readouterr().out
    assert run_of(uri, run_dir).info.status == "KILLED"


def test_sync_of_a_run_that_goes_on_leaves_it_running(tmp_path, uri, capsys):
    run_dir = new_run(tmp_path, uri)
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 4))
    assert sync.main([str(run_dir.path)]) == 0
    assert "still training" in capsys.readouterr().out
    assert run_of(uri, run_dir).info.status == run_dir.read_record()["state"].upper() == "RUNNING"


def test_sync_refuses_what_it_cannot_do(tmp_path, capsys):
    assert sync.main([str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
    masked = ended_run(tmp_path, "postgresql://me:***@db/mlflow")
    assert sync.main([str(masked.path)]) == 2
    assert "--uri" in capsys.readouterr().err
    untracked = ended_run(tmp_path, None)
    assert sync.main([str(untracked.path)]) == 2
    assert "--uri" in capsys.readouterr().err
    assert sync.main([str(untracked.path), "--uri", "mlruns"]) == 2
    assert "sqlite:///" in capsys.readouterr().err
    with exclusive(untracked):
        assert sync.main([str(untracked.path), "--uri", f"sqlite:///{tmp_path}/m.db"]) == 2
    assert "still being uploaded" in capsys.readouterr().err
    assert not Path(tmp_path / "m.db").exists()
