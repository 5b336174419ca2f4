"""Requests to stop: signals, and files in the directory of a run."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.files.golden import Golden
from helpers.records.runs import wait_for
from orchestrator import logs, stop
from orchestrator.driver.process.restarts import Child
from orchestrator.driver.process.signals import StopRequests, StopSignals
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import RunDir, request_stop, stop_requested_by


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def hangup_ignored() -> Iterator[None]:
    """As a process that ``nohup`` has started."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_hangup_counts_as_a_first_signal_only() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with StopSignals() as stop:
        with stop.raising():
            send(signal.SIGHUP, signal.SIGHUP)
            assert (stop.received, stop.cause) == (signal.SIGHUP, "SIGHUP")
            send(signal.SIGTERM, signal.SIGHUP)
            assert stop.received == signal.SIGTERM
        with pytest.raises(SystemExit), stop.raising():
            send(signal.SIGTERM)
    assert signal.getsignal(signal.SIGHUP) is before


def test_nohup_is_respected() -> None:
    with hangup_ignored(), StopSignals() as stop, Child(forward=True) as child:
        send(signal.SIGHUP)
        assert stop.received is None
        assert child.stop_signal is None
        assert child.run(["sh", "-c", "kill -HUP $$; exit 7"]).code == 7
    with Child(forward=True) as child:
        assert child.run(["sh", "-c", "kill -HUP $PPID; exec sleep 60"]).code == -signal.SIGHUP
    assert child.stop_signal == signal.SIGHUP


@pytest.fixture(params=["directory", "store"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr("orchestrator.driver.process.signals.LOOK_EVERY_REMOTE_S", 0.2)
    where = str(tmp_path) if request.param == "directory" else tmp_path.as_uri()
    output = OutputDir.of(where, staging_dir=str(tmp_path / "staging"))
    output.prepare()
    with output.locked():
        return output.create("digits-ddp")


@pytest.mark.slow
def test_a_request_stops_as_sigterm_does(run: RunDir, golden: Golden) -> None:
    signals = StopSignals()
    with StopRequests(run, signals):
        request_stop(run, by="ada on laptop")
        assert wait_for(lambda: signals.received, timeout_s=10) == signal.SIGTERM
    golden.says(signals.cause)


@pytest.mark.slow
def test_a_request_from_before_the_driver_looks_for_one_counts(run: RunDir) -> None:
    run.update_record(started=1.0)
    request_stop(run, by="ada on laptop")
    signals = StopSignals()
    with StopRequests(run, signals):
        assert wait_for(lambda: signals.received, timeout_s=10) == signal.SIGTERM


def test_a_request_to_an_earlier_launch_of_the_run_does_not_count(run: RunDir) -> None:
    run.update_record(started=1.0)
    request_stop(run, by="ada on laptop")
    run.update_record(started=2.0)
    assert stop_requested_by(run) is None
    request_stop(run, by="ada on laptop")
    assert stop_requested_by(run) is not None


def test_a_signal_before_the_request_remains_the_cause() -> None:
    signals = StopSignals()
    signals.request(signal.SIGTERM, "the first")
    signals.request(signal.SIGTERM, "the second")
    assert signals.cause == "the first"


@pytest.mark.slow
def test_a_driver_that_dies_before_it_has_stopped_is_no_stopped_run(
    run: RunDir, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    program = "import json, time; from orchestrator.records.lock import this_process; "
    program += "print(json.dumps(this_process()), flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as driver:
        run.update_record(state="running", driver=json.loads(driver.stdout.readline()), reason="stopped before")
        if run.remote is not None:
            run.remote.write(run.record_file.name, run.record_file.read_bytes())
        threading.Timer(1.0, driver.kill).start()
        assert stop.main([run.location, "--wait", "50"]) == 1
        golden.says(capsys.readouterr().out, RUN=run.location)
    assert logs.main([run.location, "--follow"]) == 0
    golden.says(capsys.readouterr().err, RUN=run.location)
    assert stop.main([run.location]) == 2
    golden.says(capsys.readouterr().err, RUN=run.location)


def test_what_does_not_run_cannot_be_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    run = RunDir(tmp_path)
    assert stop.main([str(run.path)]) == 2
    golden.says(capsys.readouterr().err)
    run.update_record(state="finished")
    assert stop.main([str(run.path)]) == 2
    golden.says(capsys.readouterr().err, RUN=run.path)
    assert not run.stop_file.exists()
