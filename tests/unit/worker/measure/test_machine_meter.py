"""What this process and others use of the CPUs."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.records.runs import wait_for
from orchestrator.worker.measure.meters import MachineMeter

BUSY_S = 0.5
BUSY = f"""
import time
while time.process_time() < {BUSY_S}:
    pass
"""
DONE = "print(flush=True); time.sleep(60)"
ORPHAN = f"""
import os, pathlib, sys
if os.fork() == 0:
    {BUSY.strip().replace(chr(10), chr(10) + "    ")}
    pathlib.Path(sys.argv[1]).touch()
"""


@pytest.mark.slow
def test_the_time_of_a_child_is_own_time() -> None:
    meter = MachineMeter()
    child = subprocess.Popen([sys.executable, "-c", BUSY + DONE], stdout=subprocess.PIPE)
    child.stdout.readline()
    use = meter.read()
    child.kill()
    child.communicate()
    assert use.own_s > BUSY_S * 0.9
    assert use.own_s < use.busy_s + 0.2, "the kernel counts the time of all CPUs in ticks"


@pytest.mark.slow
def test_the_time_of_another_program_is_not(tmp_path: Path) -> None:
    meter = MachineMeter()
    subprocess.run([sys.executable, "-c", ORPHAN, str(tmp_path / "done")], check=True)
    wait_for((tmp_path / "done").exists, timeout_s=60)
    use = meter.read()
    assert use.busy_s - use.own_s > BUSY_S * 0.6


def test_a_short_interval_goes_on() -> None:
    meter = MachineMeter()
    assert meter.read(least_s=1000.0) is None
    time.sleep(0.05)
    use = meter.read(least_s=0.0)
    assert use.busy_s + use.idle_s > 0
