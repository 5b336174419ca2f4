"""Locks between processes, with and without the help of the file system."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.records.lock import ABANDONED_S, locked, locked_by_existence, now_on

COUNT = """
import sys, time
from pathlib import Path
from orchestrator.records.lock import locked, locked_by_existence
lock, counter = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(20):
    with locked(lock) if sys.argv[3] == "flock" else locked_by_existence(lock, deadline=time.monotonic() + 20):
        counter.write_text(str(int(counter.read_text()) + 1))
"""


@pytest.mark.parametrize("kind", ["flock", "existence"])
def test_one_process_at_a_time(kind: str, tmp_path: Path) -> None:
    lock, counter = tmp_path / "lock", tmp_path / "counter"
    counter.write_text("0")
    if kind == "existence":  # left behind by a dead process, which all of them find
        lock.touch()
        os.utime(lock, (time.time() - ABANDONED_S - 1,) * 2)
    command = [sys.executable, "-c", COUNT, str(lock), str(counter), kind]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [p.wait(timeout=30) for p in processes] == [0, 0, 0]
    assert counter.read_text() == "60"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["counter", *(["lock"] if kind == "flock" else [])]


def test_a_lock_that_is_not_released_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path), pytest.raises(TimeoutError, match="lock"), locked(path, timeout_s=0.05):
        pass
    with locked(path, timeout_s=0):
        pass
    held = tmp_path / "held"
    deadline = time.monotonic() + 60
    with (
        locked_by_existence(held, deadline=deadline),
        pytest.raises(TimeoutError, match="held"),
        locked_by_existence(held, deadline=time.monotonic() + 0.05),
    ):
        pass
    assert not held.exists()


def test_a_lock_that_another_process_has_taken_away_is_not_removed(tmp_path: Path) -> None:
    held = tmp_path / "held"
    with locked_by_existence(held, deadline=time.monotonic() + 60):
        os.utime(held, (time.time() - ABANDONED_S - 1,) * 2)  # as after a long pause of this process
        with locked_by_existence(held, deadline=time.monotonic() + 60):
            pass
        held.touch()  # of a third process
    assert held.exists()


def test_the_time_of_a_file_system_leaves_no_trace(tmp_path: Path) -> None:
    assert abs(now_on(tmp_path) - time.time()) < 10
    assert list(tmp_path.iterdir()) == []
