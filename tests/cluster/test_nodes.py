"""Machines of a cluster die, are drained, and come back; the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from helpers.disks import require_mounts
from helpers.runs import PYTHONPATH

HEALTH = {"health_check_period_ms": 1000, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 4}
WORDS = (
    "tracking=none",
    "train.log_every=1",
    "train.eval_every=0",
    "checkpoint.every=0",
    "train.global_batch_size=48",
    "job._target_=helpers.leisurely_job.Leisurely",
    "job.momentum=0",
    "job.lr=0.1",
)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head with one CPU. It asks for no token, although this user may have one."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": HEALTH})
    yield made
    made.shutdown()


class Run:
    """Our command on the cluster's head, in a folder of its own."""

    def __init__(self, cluster: Cluster, folder: Path, *words: str):
        self._folder = folder
        environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "PYTHONPATH")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.launch", *WORDS, f"cluster.address={cluster.address}", *words],
            cwd=folder,
            env={**environment, "PYTHONPATH": PYTHONPATH},  # the job, for the workers too
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 100
        while not condition():
            assert self._process.poll() is None, self._process.communicate()[0]
            assert time.monotonic() < deadline, self.end()
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: max((p["step"] for p in self._lines("metrics.jsonl")), default=0) >= step)

    def finish(self) -> dict[str, Any]:
        """The summary of a run that came to its end."""
        self.output()
        (record,) = self._folder.glob("outputs/*/*/run.json")
        summary: dict[str, Any] = json.loads(record.read_text())["summary"]
        return summary

    def output(self) -> str:
        """The output of a run that came to its end."""
        output, _ = self._process.communicate(timeout=100)
        assert self._process.returncode == 0, output
        return output

    def fail(self) -> str:
        """The output of a run that failed."""
        output, _ = self._process.communicate(timeout=100)
        assert self._process.returncode == 1, output
        return output

    def end(self) -> str:
        self._process.kill()
        return self._process.communicate()[0]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self._lines("events.jsonl") if e["event"] == kind]

    def sizes(self) -> list[tuple[int, int, str | None]]:
        return [(e["num_workers_before"], e["num_workers"], e["planned"]) for e in self.events("recovered")]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        files = self._folder.glob(f"outputs/*/*/{name}")
        return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def test_a_node_is_lost_and_another_comes(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.add_node(num_cpus=1)
    run = Run(cluster, tmp_path, "strategy.num_workers=[1,2]", "train.steps=900")
    run.wait_for_step(30)
    cluster.remove_node(node, allow_graceful=False)
    run.wait_for(lambda: run.events("recovered"))
    cluster.add_node(num_cpus=1)
    summary = run.finish()
    assert len(run.events("worker_lost")) == 1
    assert run.sizes() == [(2, 1, None), (1, 2, "growing")]
    assert (summary["restarts"], summary["steps_lost"]) == (1, 0)


def test_an_output_directory_that_a_node_does_not_share_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    require_mounts()
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    with node_with_its_own(outputs, cluster):
        output = Run(cluster, tmp_path, "strategy.num_workers=2", "train.steps=30").fail()
    assert f"output_dir={outputs} is not shared: the node {socket.gethostname()} does not see this run there" in output
    assert "Traceback" not in output
    assert not list(outputs.glob("*/*/checkpoints/*"))


def test_with_a_url_every_node_writes_to_a_directory_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    require_mounts()
    store, staging = tmp_path / "store", tmp_path / "staging"
    staging.mkdir()
    url = (f"output_dir=file://{store}", f"storage.staging_dir={staging}", "storage.upload_every_s=0.5")
    faults = "recovery.chaos=[kill@20:0,kill@40:1]"
    with node_with_its_own(staging, cluster):
        run = Run(cluster, tmp_path, "strategy.num_workers=2", "train.steps=60", *url, faults)
        output = run.output()
    (stored,) = store.glob("*/*")
    assert f"run directory: file://{stored}" in output
    record = json.loads((stored / "run.json").read_text())
    assert (record["state"], record["summary"]["restarts"], record["summary"]["steps_lost"]) == ("finished", 2, 0)
    points = [json.loads(line) for line in (stored / "metrics.jsonl").read_text().splitlines()]
    assert sorted(p["step"] for p in points if "train/loss" in p) == list(range(1, 61))
    assert [p.parent.name for p in stored.glob("checkpoints/*/manifest.json")] == ["step-00000060"]
    of_driver, of_node = sorted(stored.glob("logs/**/*.log"), key=lambda p: len(p.parts))
    assert {of_driver.name, of_node.name} == {"rank-0.log", "rank-1.log"}
    assert of_node.parent.name.startswith(socket.gethostname())
    for log in (of_driver, of_node):
        assert log.read_text().count("worker process ") == 2


@contextlib.contextmanager
def node_with_its_own(folder: Path, cluster: Cluster) -> Iterator[None]:
    """A node with one CPU on which another file system is mounted at ``folder``."""
    ray_start = [
        Path(sys.executable).with_name("ray"),
        "start",
        "--address",
        cluster.address,
        "--num-cpus=1",
        "--block",
    ]
    process = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', folder, *ray_start],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while len(cluster.global_state._live_node_ids()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.campaign
def test_with_a_spare_elsewhere_a_lost_node_costs_no_step(cluster: Cluster, tmp_path: Path) -> None:
    """The spare may have been on the lost one; then there is nothing to see."""
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    run = Run(cluster, tmp_path, "strategy.num_workers=2", "recovery.spares=1", "train.steps=300")
    run.wait_for_step(30)
    workers = " ".join(run.events("generation_started")[0]["workers"])
    node = next(n for n in nodes if any(f"pid {p}" in workers for p in pids_of(n)))
    cluster.remove_node(node, allow_graceful=False)
    summary = run.finish()
    assert run.sizes() == [(2, 2, None)]
    assert (summary["restarts"], summary["steps_lost"]) == (1, 0)


@pytest.mark.campaign
def test_a_drained_node_is_left_in_time(cluster: Cluster, tmp_path: Path) -> None:
    leaving = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    run = Run(cluster, tmp_path, "strategy.num_workers=2", "train.steps=300", "recovery.max_failures=0")
    run.wait_for_step(30)
    cluster.add_node(num_cpus=1)
    drain(cluster, leaving.node_id)
    summary = run.finish()
    assert run.sizes() == [(2, 2, "preempted")]
    (handed_over,) = run.events("recovered")
    assert (handed_over["in_place"], handed_over["steps_lost"]) == (True, 0)
    assert run.events("checkpoint_saved")[0]["step"] == handed_over["step"]
    assert (summary["restarts"], summary["preemptions"]) == (0, 1)
    first, second = (set(e["workers"]) for e in run.events("generation_started"))
    assert len(first & second) == 1


def pids_of(node: Any) -> list[int]:
    (raylet,) = node.all_processes["raylet"]
    return [child.pid for child in psutil.Process(raylet.process.pid).children(recursive=True)]


def drain(cluster: Cluster, node_id: str) -> None:
    ray = Path(sys.executable).with_name("ray")
    words = [
        "--reason",
        "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message",
        "test",
        "--deadline-remaining-seconds",
        "60",
    ]
    command = [ray, "drain-node", "--address", cluster.address, "--node-id", node_id, *words]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
