"""A command that is started again after a signal has killed it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import launch
from orchestrator.driver.submit.restarts import Child, resuming


def test_a_resumed_run_is_one_that_was_not_named() -> None:
    assert resuming(["strategy=ddp"]) == ["strategy=ddp", "resume=auto"]
    assert resuming(["strategy=ddp", "resume=never"]) == ["strategy=ddp", "resume=auto"]
    assert resuming(["resume=outputs/a", "strategy=ddp"]) == ["resume=outputs/a", "strategy=ddp"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--restarts=x"], "--restarts=x: expected a whole number"),
        (["--restarts"], "--restarts: expected a whole number"),
        (["--restarts=3", "-m", "strategy=ddp,single"], "--restarts=3: only for a single run"),
    ],
)
def test_wrong_numbers_are_refused(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(words) == 2
    assert error in capsys.readouterr().err


def test_a_command_that_ends_by_itself_is_not_started_again(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "orchestrator.launch", "--restarts=3", "strategy=ddpp"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("did you mean ddp?") == 1
    assert "starting it again" not in done.stderr


@pytest.mark.parametrize(("forward", "code"), [(True, -signal.SIGTERM), (False, 0)])
def test_a_signal_that_the_child_receives_anyway_is_not_passed_on(forward: bool, code: int) -> None:
    """The child sends the signal to its parent only."""
    with Child(forward=forward) as child:
        assert child.run(["sh", "-c", "sleep 0.3; kill -TERM $PPID; sleep 1"]) == code
    assert child.stop_signal == signal.SIGTERM
