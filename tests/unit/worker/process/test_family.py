"""Whatever a worker has started ends with it, also after a SIGKILL."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from orchestrator.worker.process import family

WORKER = """
import os, subprocess, sys
from orchestrator.worker.process import family
os.environ[family.MARK] = mark = str(os.getpid())
guard = family.guard(os.getpid(), f"{family.MARK}={mark}")
child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
print(guard, child.pid, flush=True)
sys.stdin.read()
"""


def ends(pid: int, timeout_s: float = 30) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("disarmed", [False, True])
def test_a_guard_ends_the_family_of_a_killed_worker_unless_it_is_disarmed(disarmed: bool) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    guard, child = map(int, worker.stdout.readline().split())
    try:
        if disarmed:
            os.kill(guard, signal.SIGTERM)
            assert ends(guard)
        worker.kill()
        worker.communicate()
        assert ends(child, timeout_s=0.3 if disarmed else 30) is not disarmed
        assert ends(guard)
    finally:
        for pid in (child, guard):
            if not ends(pid, timeout_s=0):
                os.kill(pid, signal.SIGKILL)


def test_only_the_family_is_ended() -> None:
    mark = f"{family.MARK}=test-{os.getpid()}"
    name, _, value = mark.partition("=")
    own, other, longer = (
        subprocess.Popen(["sleep", "600"], env={**os.environ, name: text}, start_new_session=True)
        for text in (value, "another", f"{value}0")
    )
    try:
        family.end_family(mark, group=own.pid)
        assert own.wait(30) == -signal.SIGKILL
        assert (other.poll(), longer.poll()) == (None, None)
    finally:
        for process in (own, other, longer):
            process.kill()
            process.wait()
