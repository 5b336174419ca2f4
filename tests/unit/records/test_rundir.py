"""The run directory: its place, its record, and whether its driver lives."""

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
from orchestrator.records.json_file import write_json
from orchestrator.records.lease import Lease, SupersededError
from orchestrator.records.lock import is_alive, this_process
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
        t.join(timeout=60)
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
    reader.join(timeout=60)
    assert not errors
    assert sorted(p.name for p in run.path.iterdir()) == [".lock", "checkpoints", "logs", "run.json"]


DAMAGED = [
    b"",
    b"{",
    b'{"a": ',
    b"[]",
    b"null",
    b"\x00\x01",
    b"\xff{}",
    b"[" * 200_000,
    b'{"state": ["running"]}',
    b'{"state": "running", "driver": 7}',
    b'{"started": "yesterday"}',
    b'{"plan": {"mesh": "two"}}',
    b'{"plan": {"steps": "many"}}',
    b'{"summary": [1, 2]}',
    b'{"sweep": "mine"}',
    b'{"tracking": {"uri": 5}}',
]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_record_is_named(content: bytes, tmp_path: Path) -> None:
    run = rundir.create(tmp_path, "x")
    run.record_file.write_bytes(content)
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        run.read_record()


def test_all_runs_come_newest_first(tmp_path: Path) -> None:
    names = ["2026-01-02/09-00-00-a", "2026-01-02/10-00-00-b", "2025-12-31/23-00-00-c"]
    for name in [*names, "2026-01-02/11-00-00-without-record"]:
        (tmp_path / name).mkdir(parents=True)
    for name in names:
        write_json(tmp_path / name / "run.json", {})
    found = [str(r.path.relative_to(tmp_path)) for r in rundir.all_runs(tmp_path)]
    assert found == [names[1], names[0], names[2]]
    assert list(rundir.all_runs(tmp_path / "nowhere")) == []


def test_this_process_is_alive_and_another_one_with_its_number_is_not() -> None:
    me = this_process()
    assert is_alive(me)
    assert is_alive(json.loads(json.dumps(me)))
    assert not is_alive({**me, "start_ticks": me["start_ticks"] - 100})
    assert not is_alive({"host": me["host"]})


def test_a_step_of_the_clock_changes_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The boot time that /proc/stat gives follows the clock; psutil adds it to the start of a process."""
    me = this_process()
    boot_time = psutil.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_time + 1)
    psutil.Process().create_time()
    assert is_alive(me)
    assert this_process() == me


def test_a_dead_process_and_a_zombie_are_not_alive() -> None:
    code = "import json; from orchestrator.records.lock import this_process\n"
    code += "print(json.dumps(this_process()), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    process = json.loads(child.stdout.readline())
    assert is_alive(process)
    child.kill()
    deadline = time.monotonic() + 10
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(process)
    child.wait(timeout=60)
    assert not is_alive(process)
    child.stdin.close()
    child.stdout.close()


ELSEWHERE = {**this_process(), "host": "elsewhere", "boot_id": "another"}


def test_a_driver_of_another_host_lives_as_long_as_it_renews_its_lease(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.update_record(state="running", driver=ELSEWHERE)
    assert run.driver_if_running() == ELSEWHERE
    long_ago = time.time() - rundir.LEASE_S - 1
    os.utime(run.record_file, (long_ago, long_ago))
    assert run.driver_if_running() is None
    run.lease_file.touch()
    assert run.driver_if_running() == ELSEWHERE
    os.utime(run.lease_file, (long_ago, long_ago))
    assert run.driver_if_running() is None
    assert not list(tmp_path.glob(".probe*"))


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_a_lease_is_judged_by_the_clock_of_the_files(
    ahead_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    run.update_record(state="running", driver=ELSEWHERE)
    run.lease_file.touch()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + ahead_s)
    assert run.driver_if_running() == ELSEWHERE
    for path in (run.lease_file, run.record_file):
        os.utime(path, (now - rundir.LEASE_S - 1,) * 2)
    assert run.driver_if_running() is None


IS_RUNNING = """
import sys
from pathlib import Path
from orchestrator.records.run_dir import RunDir
print(RunDir(Path(sys.argv[1])).driver_if_running() is not None)
"""


@pytest.mark.parametrize("options", [("--pid", "--fork", "--mount-proc"), ("--time", "--boottime", "86400")])
def test_a_driver_in_another_container_of_this_host_lives_as_long_as_its_lease(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """Containers may share the name of their host.

    A process id means nothing in another PID namespace, and the start of a process nothing in another time namespace.
    """
    apart = ["unshare", "--map-root-user", *options]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"no right to unshare {options[0]}")
    run = RunDir(tmp_path)
    run.update_record(state="running", driver=this_process())
    asked = [*apart, sys.executable, "-c", IS_RUNNING, str(tmp_path)]

    def running() -> str:
        return subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.strip()

    assert running() == "True"
    long_ago = time.time() - rundir.LEASE_S - 1
    os.utime(run.record_file, (long_ago, long_ago))
    assert running() == "False"


def test_a_driver_of_this_host_lives_as_its_process_does(tmp_path: Path) -> None:
    run, me = RunDir(tmp_path), this_process()
    run.update_record(state="running", driver=me)
    long_ago = time.time() - rundir.LEASE_S - 1
    os.utime(run.record_file, (long_ago, long_ago))
    assert run.driver_if_running() == me
    run.update_record(driver={**me, "start_ticks": 0})
    assert run.driver_if_running() is None
    run.update_record(driver=me, state="finished")
    assert run.driver_if_running() is None


def test_a_driver_that_was_replaced_gives_up(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.update_record(driver=this_process())
    lease = Lease(run)
    assert lease.renew()
    lease.check()
    assert run.lease_file.exists()
    renewed = run.lease_file.stat().st_mtime_ns
    run.update_record(driver={**ELSEWHERE, "pid": 7})
    lease.renew()
    with pytest.raises(SupersededError, match="pid 7 on elsewhere"):
        lease.check()
    lease.admit("mine")
    assert not run.fence_file.exists(), "the other driver's workers save now"
    assert run.lease_file.stat().st_mtime_ns == renewed


def test_a_lease_is_renewed_while_the_driver_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.records.lease.RENEW_EVERY_S", 0.01)
    run = RunDir(tmp_path)
    run.update_record(driver=this_process())
    with Lease(run):
        os.utime(run.lease_file, (1e6, 1e6))
        deadline = time.monotonic() + 10
        while run.lease_file.stat().st_mtime == 1e6:  # this thread does not take part
            assert time.monotonic() < deadline


def test_processes_that_change_the_record_wait_for_each_other(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    code = "import sys; from pathlib import Path; from orchestrator.records.run_dir import RunDir\n"
    code += "for i in range(30): RunDir(Path(sys.argv[1])).update_record(**{f'{sys.argv[2]}-{i}': i})"
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in "ab"]
    assert [writer.wait(timeout=30) for writer in writers] == [0, 0]
    assert run.read_record() == {f"{name}-{i}": i for name in "ab" for i in range(30)}


def test_a_record_that_cannot_be_replaced_stays(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (run.record_file / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match=r"run\.json"):
        write_json(run.record_file, {"state": "finished"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.json"]
