"""The Ray that a run embeds: what it starts, and where it listens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.commands import environment

SCRIPT = """
import multiprocessing

import psutil

from helpers.cases import CLUSTER
from orchestrator.driver.process.cluster import embedded

multiprocessing.cpu_count = lambda: 16  # Ray starts no more processes at once than there are cores


def is_worker(process):
    command = process.cmdline()
    return "ray::IDLE" in command or any(part.endswith("default_worker.py") for part in command)


with embedded(CLUSTER, num_cpus=2 * 4, num_gpus=0, num_processes=2):
    (raylet,) = (child for child in psutil.Process().children() if child.name() == "raylet")
    print("started in advance:", sum(map(is_worker, raylet.children())))
    agents = [child for child in raylet.children() if not is_worker(child)]
    print("services:", *sorted(child.name() for child in psutil.Process().children()), len(agents))
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    connections = [connection for process in processes for connection in process.net_connections("inet")]
    print("listens on:", *{c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN})
_, alive = psutil.wait_procs([p for p in processes if p.pid != psutil.Process().pid], timeout=30)
print("left:", *(process.cmdline() for process in alive))
"""


@pytest.mark.timeout(100)
def test_it_starts_only_what_workers_need_listens_on_loopback_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    in_advance, services, listening, left = done.stdout.splitlines()
    assert in_advance == "started in advance: 2"
    assert services == "services: gcs_server raylet 2"  # the agents of runtime environments, and of no dashboard
    assert left == "left:"
    addresses = listening.removeprefix("listens on: ").split()
    assert "127.0.0.1" in addresses
    assert set(addresses) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
