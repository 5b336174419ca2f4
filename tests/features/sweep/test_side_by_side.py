"""How many runs of a sweep are in progress at once, and whose end ends them."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.files.golden import Golden
from helpers.machines.plans import GPU_BOX, plan_of
from orchestrator.config.build import ConfigError
from orchestrator.driver.checked_runs import check_all
from orchestrator.features.sweep.side_by_side import num_at_once

CHILD = """
import os, signal
from orchestrator.records.lock import end_with_parent
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"ended\\n"), os._exit(0)))
end_with_parent(signal.SIGTERM)
print("up", flush=True)
signal.pause()
"""

PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]]).wait()
"""


def test_as_many_of_the_largest_run_as_there_is_room_for() -> None:
    nodes = GPU_BOX + GPU_BOX  # 32 CPUs and 8 GPUs
    two, three = (plan_of(nodes, "strategy=ddp", f"strategy.num_workers={n}") for n in (2, 3))
    assert num_at_once([two] * 9, nodes) == 4
    assert num_at_once([two, three, two], nodes) == 2
    assert num_at_once([two], nodes) == 1
    on_cpus = plan_of(nodes, "strategy=ddp", "strategy.num_workers=2", "cluster.device=cpu", "recovery.spares=1")
    assert num_at_once([on_cpus] * 20, nodes) == 10


def test_an_embedded_ray_has_room_for_one_run(tmp_path: Path, golden: Golden) -> None:
    words = [f"output_dir={tmp_path}", "tracking=none"]
    with golden.raises(ConfigError):
        check_all([[*words, "sweep.parallel=2"]])
    check_all([[*words, "sweep.parallel=auto"]])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux tells a process that its parent has ended")
def test_a_driver_gets_a_signal_when_the_sweep_is_killed() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "up\n"
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.readline() == "ended\n"
