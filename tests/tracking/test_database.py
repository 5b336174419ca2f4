"""MLflow's SQLite database, created by processes that start together or are killed meanwhile."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.features.tracking.mlflow import create_database

OPEN = """
import sys
from orchestrator.features.tracking.mlflow import MlflowBackend
import mlflow.tracking  # seconds: before the race begins
print("ready", flush=True)
sys.stdin.readline()
record = {"uid": sys.argv[2], "name": "digits", "tracking": {"experiment": "tests"}}
print(MlflowBackend(sys.argv[1], request_timeout_s=30).open_run(record, run_id=None, start_time=1.0, running=True))
"""


def opener(uri: str, uid: str) -> subprocess.Popen[str]:
    """A process that is about to open a run in the database."""
    process = subprocess.Popen(
        [sys.executable, "-c", OPEN, uri, uid], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(*processes: subprocess.Popen[str]) -> list[str]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return answers


def race(folder: Path) -> None:
    """Two runs start at once where there is no database yet."""
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    first, second = go(opener(uri, "a"), opener(uri, "b"))
    assert len({first, second}) == 2
    assert sorted(p.name for p in folder.glob("*mlflow.db*")) == [".mlflow.db.lock", "mlflow.db"]


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_two_runs_that_start_together_20_times(tmp_path):
    for number in range(20):
        (tmp_path / str(number)).mkdir()
        race(tmp_path / str(number))


@pytest.mark.campaign
def test_a_process_killed_while_it_creates_the_database_leaves_none_and_two_that_start_then_both_work(tmp_path):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    victim = opener(uri, "a")
    assert victim.stdin is not None
    victim.stdin.write("go\n")
    victim.stdin.flush()
    deadline = time.monotonic() + 60
    while not any(tables_in(path) > 3 for path in tmp_path.glob("*mlflow.db*")):
        assert victim.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate(timeout=60)
    assert not (tmp_path / "mlflow.db").exists()
    race(tmp_path)


def tables_in(path: Path) -> int:
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=0) as connection:
            return int(connection.execute("select count(*) from sqlite_master").fetchone()[0])
    except sqlite3.Error:
        return 0


def test_an_existing_database_is_left_alone_and_an_empty_file_is_none(tmp_path):
    path = tmp_path / "mlflow.db"
    path.touch()
    create_database(path, lambda file: file.write_text("tables"), timeout_s=1)
    create_database(path, lambda file: file.write_text("other"), timeout_s=1)
    assert path.read_text() == "tables"


def test_a_failure_leaves_nothing(tmp_path):
    def fail(file: Path) -> None:
        file.write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        create_database(tmp_path / "mlflow.db", fail, timeout_s=1)
    assert [p.name for p in tmp_path.iterdir()] == [".mlflow.db.lock"]
