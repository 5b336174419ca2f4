"""The Ray that a run embeds: what it starts, and where it listens."""

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.jobs.row_jobs import write_files
from helpers.machines.commands import environment
from helpers.records.runs import in_campaign

SCRIPT = """
import contextlib
import multiprocessing
import os
import sys
import time

import psutil

from helpers.conformance.cases import CLUSTER
from orchestrator.compat.ray.connection import session_folder
from orchestrator.driver.process.cluster import embedded, started_early

multiprocessing.cpu_count = lambda: 16  # Ray starts no more processes at once than there are cores


def is_worker(process):
    command = process.cmdline()
    return "ray::IDLE" in command or any(part.endswith("default_worker.py") for part in command)


with contextlib.ExitStack() as stack:
    if sys.argv[1] == "refused first":
        with started_early(num_workers=2):
            everyone = psutil.Process().children(recursive=True)
        _, alive = psutil.wait_procs(everyone, timeout=30)
        print("refused:", len(everyone) >= 2, alive, *session_folder().glob(f"session_*_{os.getpid()}"))
    if sys.argv[1] != "late":
        stack.enter_context(started_early(num_workers=2))
        (early,) = (child for child in psutil.Process().children() if child.name() == "raylet")
    with embedded(CLUSTER, num_cpus=2 * 4, num_gpus=0, num_processes=2):
        (raylet,) = (child for child in psutil.Process().children() if child.name() == "raylet")
        if sys.argv[1] != "late":
            print("adopted:", raylet == early)
        deadline = time.monotonic() + 60
        while sum(map(is_worker, raylet.children())) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        workers = list(filter(is_worker, raylet.children()))
        print("started in advance:", len(workers))
        print("heaps of each:", *(worker.environ()["MALLOC_ARENA_MAX"] for worker in workers))
        agents = [child for child in raylet.children() if not is_worker(child)]
        print("services:", *sorted(child.name() for child in psutil.Process().children()), len(agents))
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        connections = [connection for process in processes for connection in process.net_connections("inet")]
        print("listens on:", *{c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN})
"""


@pytest.mark.timeout(100)
@pytest.mark.parametrize("begun", ["early", *in_campaign("refused first", "late")])
def test_it_starts_only_what_workers_need_and_listens_on_loopback(tmp_path: Path, begun: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, begun],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    *early, in_advance, heaps, services, listening = done.stdout.splitlines()
    expected = {"refused first": ["refused: True []", "adopted: True"], "early": ["adopted: True"], "late": []}
    assert early == expected[begun]
    assert in_advance == "started in advance: 2"
    assert heaps == "heaps of each: 1 1"
    assert services == "services: gcs_server raylet 2"  # the agents of runtime environments, and of no dashboard
    addresses = listening.removeprefix("listens on: ").split()
    assert "127.0.0.1" in addresses
    assert set(addresses) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


@pytest.mark.campaign  # ``test_notebook.py`` finds what a run itself writes there
@pytest.mark.timeout(100)
def test_a_run_writes_nothing_to_standard_error(tmp_path: Path) -> None:
    # Models of others import triton too, which reports leaks when the process ends.
    script = "import sys, torch.utils.flop_counter; from orchestrator.launch import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, "strategy=single", "train.steps=2", "tracking=none"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


ROWS = """
import sys
from orchestrator import run

result = run(["strategy=ddp", "strategy.num_workers=2", "job._target_=helpers.jobs.row_jobs.RowJob", "job.kind=rows",
              f"job.folder={sys.argv[1]}", "train.epochs=0.25", "train.global_batch_size=36", "tracking=none"])
print("ended:", result.exit_code, result.summary["steps"], result.reason)
"""


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_it_has_cpus_for_tasks_that_read_the_data(tmp_path: Path) -> None:
    """Also where the command has not started it early."""
    write_files(tmp_path / "rows")
    done = subprocess.run(
        [sys.executable, "-c", ROWS, str(tmp_path / "rows")],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert "ended: 0 3" in done.stdout, done.stdout + done.stderr
