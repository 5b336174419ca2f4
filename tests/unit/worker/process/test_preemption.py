"""SIGTERM is a notice to a worker, and the end of a process that it has forked."""

import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing, os, signal, threading, time
from orchestrator.worker.base_actor import TerminationNotice

notices = []
thread = threading.Thread(target=lambda: notices.append(TerminationNotice()))  # as in a worker: not the main one
thread.start()
thread.join()
(notice,) = notices
context = multiprocessing.get_context("fork")
is_up = context.Event()
child = context.Process(target=lambda: (is_up.set(), time.sleep(60)), daemon=True)
child.start()
assert is_up.wait(10)
child.terminate()
child.join(10)
assert child.exitcode == -signal.SIGTERM, child.exitcode
assert not notice.received()
for _ in range(3):
    os.kill(os.getpid(), signal.SIGTERM)
deadline = time.monotonic() + 10
while not notice.received() and time.monotonic() < deadline:
    time.sleep(0.01)
assert notice.received()
for _ in range(2000):
    os.kill(os.getpid(), signal.SIGTERM)  # more than a pipe holds
assert notice.received()
print("lives on")
"""


@pytest.mark.slow
def test_a_notice_is_taken_and_the_process_lives_on() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "lives on\n"
