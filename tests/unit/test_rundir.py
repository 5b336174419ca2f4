"""The run directory: its place, its record, and whether its driver lives."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from orchestrator.records import run_dir as rundir
from orchestrator.records.lease import Lease, SupersededError
from orchestrator.records.run_dir import RunDir


def test_a_run_directory_lies_under_its_day_and_bears_time_and_name(tmp_path: Path) -> None:
    run = rundir.create(tmp_path / "outputs", "digits-ddp")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-digits-ddp", str(run.path.relative_to(tmp_path / "outputs")))
    assert run.path.is_absolute()
    assert sorted(p.name for p in run.path.iterdir()) == ["checkpoints", "logs"]
    assert run.log_file(3) == run.path / "logs" / "rank-3.log"


def test_runs_of_the_same_second_do_not_share_a_directory(tmp_path: Path) -> None:
    made: list[rundir.RunDir] = []
    threads = [threading.Thread(target=lambda: made.append(rundir.create(tmp_path, "x"))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=10)
    assert len({run.path for run in made}) == 8


@pytest.mark.parametrize("place", ["/proc/nowhere", "{tmp}/file/below"])
def test_a_place_that_cannot_be_written(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"nowhere|file"):
        rundir.create(Path(place.format(tmp=tmp_path)), "x")


def test_the_record_is_updated_key_by_key_and_never_half_written(tmp_path: Path) -> None:
    run = rundir.create(tmp_path, "x")
    assert run.read_record() == {}
    run.update_record(state="running", a=1, where=tmp_path)
    run.update_record(state="finished", b={"c": [1, None]})
    assert run.read_record() == {"state": "finished", "a": 1, "where": str(tmp_path), "b": {"c": [1, None]}}

    stop = threading.Event()
    errors: list[Exception] = []

    def read() -> None:
        while not stop.is_set():
            try:
                assert json.loads(run.record_file.read_text())["a"] == 1
            except Exception as e:
                errors.append(e)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(200):
        run.update_record(text="x" * 10_000, i=i)
    stop.set()
    reader.join(timeout=10)
    assert not errors
    assert sorted(p.name for p in run.path.iterdir()) == ["checkpoints", "logs", "run.json"]


@pytest.mark.parametrize("text", ["", "{", '{"a": ', "[]", "\x00\x01"])
def test_a_damaged_record_is_named(text: str, tmp_path: Path) -> None:
    run = rundir.create(tmp_path, "x")
    run.record_file.write_text(text)
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        run.read_record()


def test_all_runs_come_newest_first(tmp_path: Path) -> None:
    names = ["2026-01-02/09-00-00-a", "2026-01-02/10-00-00-b", "2025-12-31/23-00-00-c"]
    for name in [*names, "2026-01-02/11-00-00-without-record"]:
        (tmp_path / name).mkdir(parents=True)
    for name in names:
        rundir.write_json(tmp_path / name / "run.json", {})
    found = [str(r.path.relative_to(tmp_path)) for r in rundir.all_runs(tmp_path)]
    assert found == [names[1], names[0], names[2]]
    assert list(rundir.all_runs(tmp_path / "nowhere")) == []


def test_this_process_is_alive_and_another_one_with_its_number_is_not() -> None:
    me = rundir.this_process()
    assert rundir.is_alive(me)
    assert rundir.is_alive(json.loads(json.dumps(me)))
    assert not rundir.is_alive({**me, "created": me["created"] - 100})
    assert not rundir.is_alive({"host": me["host"]})


def test_a_dead_process_and_a_zombie_are_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = {**rundir.this_process(), "pid": child.pid, "created": psutil.Process(child.pid).create_time()}
    assert rundir.is_alive(process)
    child.kill()
    deadline = time.monotonic() + 10
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not rundir.is_alive(process)
    child.wait(timeout=10)
    assert not rundir.is_alive(process)


def test_a_driver_of_another_host_lives_as_long_as_it_renews_its_lease(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    elsewhere = {**rundir.this_process(), "host": "elsewhere"}
    run.update_record(state="running", driver=elsewhere)
    assert run.driver_if_running() == elsewhere
    long_ago = time.time() - rundir.LEASE_S - 1
    os.utime(run.record_file, (long_ago, long_ago))
    assert run.driver_if_running() is None
    run.lease_file.touch()
    assert run.driver_if_running() == elsewhere
    os.utime(run.lease_file, (long_ago, long_ago))
    assert run.driver_if_running() is None


def test_a_driver_of_this_host_lives_as_its_process_does(tmp_path: Path) -> None:
    run, me = RunDir(tmp_path), rundir.this_process()
    run.update_record(state="running", driver=me)
    long_ago = time.time() - rundir.LEASE_S - 1
    os.utime(run.record_file, (long_ago, long_ago))
    assert run.driver_if_running() == me
    run.update_record(driver={**me, "created": 0.0})
    assert run.driver_if_running() is None
    run.update_record(driver=me, state="finished")
    assert run.driver_if_running() is None


def test_a_driver_that_was_replaced_gives_up(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.update_record(driver=rundir.this_process())
    Lease(run).renew()
    assert run.lease_file.exists()
    run.update_record(driver={**rundir.this_process(), "host": "elsewhere", "pid": 7})
    with pytest.raises(SupersededError, match="pid 7 on elsewhere"):
        Lease(run).renew()
