"""A command that is started again after a signal has killed it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.files.golden import Golden
from orchestrator import launch
from orchestrator.config.redact import Redactor
from orchestrator.driver.process import restarts
from orchestrator.driver.process.restarts import Child, launch_with_restarts
from orchestrator.records.run_dir import RunDir

pytestmark = pytest.mark.slow  # processes that are started again

DRIVER = """
import os, sys
from pathlib import Path
from orchestrator.driver.process.origin import left_run, report_end, report_run
from orchestrator.records.run_dir import RunDir

run_dir, *ends = RunDir(Path(sys.argv[1])), *sys.argv[2:]
starts = run_dir.path / "starts"
before = starts.read_text().splitlines() if starts.exists() else []
starts.write_text("\\n".join([*before, left_run() or "afresh"]))
end = ends[len(before)]
if end not in ("early", "silent"):
    report_run(run_dir)
    print(f"run directory: {run_dir.path}")
if end == "done":
    report_end()
    print("the verdict")
elif end == "silent":
    os._exit(0)
elif end == "lost":
    os.write(2, b"[C++] Failed to connect to GCS\\n")
    os._exit(1)
else:
    os.kill(os.getpid(), 9)
"""
"""A driver that ends each time in the next of the ways that it is given, and writes down which run it continues."""


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--restarts=x"], "--restarts=x: expected a whole number"),
        (["--restarts"], "--restarts: expected one argument"),
        (["--restarts=3", "-m", "strategy=ddp,single"], "--restarts=3: only for a single run"),
    ],
)
def test_wrong_numbers_are_refused(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(words) == 2
    assert error in capsys.readouterr().err


@pytest.mark.slow
def test_a_command_that_ends_by_itself_is_not_started_again(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "orchestrator.launch", "--restarts=3", "strategy=ddpp"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("did you mean ddp?") == 1
    assert "starting it again" not in done.stderr


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the driver be ``DRIVER``, which gets the run directory ``run`` as its first word."""
    (tmp_path / "run").mkdir()
    (tmp_path / "driver.py").write_text(DRIVER)
    monkeypatch.setattr(restarts, "DRIVER", (sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "run")))
    monkeypatch.setattr(restarts, "RESTART_DELAY_S", 0.0)
    return tmp_path / "run"


def test_a_driver_that_is_started_again_continues_exactly_its_own_run(driver: Path) -> None:
    assert launch_with_restarts(["early", "killed", "lost", "done"], 3, Redactor()) == 0
    assert (driver / "starts").read_text().splitlines() == ["afresh", "afresh", str(driver), str(driver)]


@pytest.mark.parametrize(
    ("ends", "code", "how"),
    [
        (["killed"], 137, "the driver was killed by SIGKILL"),
        (["lost"], 1, "the driver ended with exit code 1, without a verdict"),
        (["killed", "early"], 137, "the driver was killed by SIGKILL"),
    ],
)
def test_the_last_lines_say_how_a_run_stands_whose_driver_could_not(
    driver: Path, capfd: pytest.CaptureFixture[str], ends: list[str], code: int, how: str
) -> None:
    RunDir(driver).update_record(state="running")
    (driver / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert launch_with_restarts(ends, len(ends) - 1, Redactor()) == code
    assert capfd.readouterr().err.splitlines()[-3:] == [
        f"died: {how}",
        f"run directory: {driver}",
        f"next: python -m orchestrator.launch {' '.join(ends)} resume={driver}",
    ]


def test_a_run_that_has_finished_is_not_started_again(driver: Path, capfd: pytest.CaptureFixture[str]) -> None:
    RunDir(driver).update_record(state="finished")
    assert launch_with_restarts(["killed", "done"], 1, Redactor()) == 0
    verdict = ["finished: afterwards the driver was killed by SIGKILL", f"run directory: {driver}"]
    assert capfd.readouterr().err.splitlines() == verdict


def test_a_stop_before_the_driver_is_started_again_ends_the_launch(
    driver: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    assert launch_with_restarts(["killed", "done"], 1, Redactor()) == 143
    assert (driver / "starts").read_text().splitlines() == ["afresh"]
    assert capfd.readouterr().err.splitlines()[1:] == [
        "died: the driver was killed by SIGKILL",
        f"run directory: {driver}",
    ]


def test_a_driver_that_says_nothing_has_not_succeeded(
    driver: Path, capfd: pytest.CaptureFixture[str], golden: Golden
) -> None:
    assert launch_with_restarts(["silent"], 1, Redactor()) == 1
    golden.says(capfd.readouterr().err)
    assert (driver / "starts").read_text() == "afresh"


def test_nothing_follows_the_verdict_of_a_driver(driver: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch_with_restarts(["done"], 1, Redactor()) == 0
    assert capfd.readouterr() == (f"run directory: {driver}\nthe verdict\n", "")


@pytest.mark.parametrize(("forward", "code"), [(True, -signal.SIGTERM), (False, 0)])
def test_a_signal_that_the_child_receives_anyway_is_not_passed_on(forward: bool, code: int) -> None:
    """The child sends the signal to its parent only."""
    with Child(forward=forward) as child:
        assert child.run(["sh", "-c", f"sleep 0.3; kill -TERM $PPID; exec sleep {60 if forward else 0.1}"]).code == code
    assert child.stop_signal == signal.SIGTERM
