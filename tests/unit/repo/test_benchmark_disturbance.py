"""What other programs use of the CPUs is told from what a benchmark's own processes use."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

BUSY = "import time\nwhile time.process_time() < 0.3: pass\nprint('.', flush=True)\ntime.sleep(60)"

OBSERVE = f"""
import json, os, subprocess, sys
from harness.arms import environment
from harness.disturbance import OtherPrograms

def orphan(env):
    # Its parent, a shell, has ended: it is no descendant any more, like the processes of Ray.
    shell = ["sh", "-c", '"$0" -c "$1" & echo $!', sys.executable, {BUSY!r}]
    process = subprocess.Popen(shell, env=env, stdout=subprocess.PIPE, text=True)
    process.wait()
    pid = int(process.stdout.readline())
    started.append(process.stdout)
    return pid

started = []
try:
    with OtherPrograms() as others:
        own, other = orphan(environment()), orphan(dict(os.environ))
        child = subprocess.Popen([sys.executable, "-c", {BUSY!r}], stdout=subprocess.PIPE, text=True)
        started.append(child.stdout)
        for stream in started:
            stream.readline()
    print(json.dumps([others.used_s.get(other, 0.0), own in others.used_s, child.pid in others.used_s, others.share]))
finally:
    for pid in (own, other, child.pid):
        os.kill(pid, 9)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_programs_that_are_not_the_benchmarks_count() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OBSERVE], cwd=BENCHMARKS, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    used_s, own_counts, child_counts, share = json.loads(done.stdout)
    assert used_s >= 0.25
    assert not own_counts
    assert not child_counts
    assert 0 < share < 1.5
