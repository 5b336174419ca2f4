"""Machines of a cluster die, are drained, and come back; the run goes on."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from helpers.machines.disks import require_mounts
from helpers.machines.nodes import node_with_its_own
from helpers.machines.queue_entries import entry
from helpers.machines.unfit import other_torch
from helpers.ranks.script_runs import SCRIPTS
from helpers.records.runs import events_below, last_step, wait_for, wait_for_step
from orchestrator import stop
from orchestrator.compat.ray.connection import RECONNECT_TIMEOUT
from orchestrator.compat.ray.side_effects import without_services
from orchestrator.config.redact import Redactor
from orchestrator.driver.process.run_context import EventStream
from orchestrator.driver.process.signals import StopSignals
from orchestrator.features.queue.turns import QueuePlace

HEALTH = {"health_check_period_ms": 1000, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 4}
WORDS = (
    "tracking=none",
    "train.log_every=1",
    "train.eval_every=0",
    "checkpoint.every=0",
    "train.global_batch_size=48",
    "job._target_=helpers.jobs.leisurely_job.Leisurely",
    "job.momentum=0",
    "job.lr=0.1",
)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head with one CPU. It asks for no token, although this user may have one."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with without_services():
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": HEALTH})
        yield made
        made.shutdown()


class Run:
    """A command that runs in ``folder``."""

    def __init__(self, process: subprocess.Popen[str], folder: Path):
        self._process, self._folder = process, folder

    def wait_for(self, condition: Callable[[], Any]) -> None:
        """Wait while the command runs."""

        def met() -> Any:
            assert self._process.poll() is None, self._process.communicate()[0]
            return condition()

        try:
            wait_for(met)
        except AssertionError as e:
            files = self._folder.glob("outputs/*/*/events.jsonl")
            raise AssertionError(f"{e}; the events: {[file.read_text() for file in files]}") from e

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: last_step(self._folder) >= step)

    def stop(self) -> dict[str, Any]:
        """Stop the command; returns the summary of its run."""
        self._process.send_signal(signal.SIGINT)
        self.output(code=130)
        return self.summary()

    def finish(self) -> dict[str, Any]:
        """The summary of a run that comes to its end."""
        self.output(code=0)
        return self.summary()

    def output(self, *, code: int) -> str:
        """What the command has printed when it has ended with ``code``."""
        output, _ = self._process.communicate(timeout=300)
        assert self._process.returncode == code, output
        return output

    def events(self, kind: str) -> Sequence[dict[str, Any]]:
        return events_below(self._folder, kind)

    def warnings(self) -> list[str]:
        return [event["message"] for event in self.events("warned")]

    def waiting_for(self, wanted: str) -> bool:
        return any(event["wanted"] == wanted for event in self.events("waiting_for_resources"))

    def sizes(self) -> list[tuple[int, int, str | None]]:
        return [(e["num_workers_before"], e["num_workers"], e["planned"]) for e in self.events("recovered")]

    def summary(self) -> dict[str, Any]:
        """The summary of the run, which has ended."""
        (record,) = self._folder.glob("outputs/*/*/run.json")
        summary: dict[str, Any] = json.loads(record.read_text())["summary"]
        return summary


@pytest.fixture
def start(cluster: Cluster, launch: Callable[..., Any], tmp_path: Path) -> Callable[..., Run]:
    """``start("train.steps=30", ...)`` runs our command on the cluster's head."""
    words = (*WORDS, f"cluster.address={cluster.address}")
    return lambda *more: Run(launch(*words, *more, RAY_AUTH_MODE="disabled"), tmp_path)


@pytest.mark.campaign
def test_a_node_is_lost_and_another_comes(cluster: Cluster, start: Callable[..., Run]) -> None:
    node = cluster.add_node(num_cpus=1)
    run = start("strategy.num_workers=[1,2]", "train.steps=100000")
    run.wait_for_step(30)
    cluster.remove_node(node, allow_graceful=False)
    run.wait_for(lambda: run.events("recovered"))
    cluster.add_node(num_cpus=1)
    run.wait_for(lambda: len(run.events("recovered")) == 2)
    summary = run.stop()
    assert len(run.events("worker_lost")) == 1
    assert run.sizes() == [(2, 1, None), (1, 2, "growing")]
    assert (summary["restarts"], summary["steps_lost"]) == (1, 0)


@pytest.mark.campaign
def test_a_script_restarts_with_fewer_and_more_ranks_and_after_a_more_urgent_run(
    cluster: Cluster, launch: Callable[..., Any], tmp_path: Path
) -> None:
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    words = ("strategy=script", f"job.script={SCRIPTS / 'counting.py'}", "strategy.num_workers=[1,2]", "name=counting")
    more = ("tracking=none", "recovery.max_failures=3", f"cluster.address={cluster.address}")
    run = Run(launch(*words, *more, RAY_AUTH_MODE="disabled"), tmp_path)

    def starts() -> list[tuple[str, ...]]:
        """Of each start of the script its ranks, the step from which they continue, and the attempt."""
        logs = "".join(log.read_text() for log in tmp_path.glob("outputs/*/*/logs/rank-0.log"))
        return re.findall(r"(\d) ranks from step (\d+), attempt (\d)", logs)

    run.wait_for(lambda: len(starts()) == 1)
    cluster.remove_node(node, allow_graceful=False)
    run.wait_for(lambda: len(starts()) == 2)
    cluster.add_node(num_cpus=1)
    run.wait_for(lambda: len(starts()) == 3)
    ray.init(address=cluster.address)
    urgent = entry("urgent", priority=1, workers=2)
    with QueuePlace(urgent, EventStream([], Redactor()), StopSignals(), timeout_s=None, unfit_timeout_s=None) as place:
        run.wait_for(lambda: run.events("yielded"))
        place.wait_for_turn(lambda: None)
    ray.shutdown()
    run.wait_for(lambda: len(starts()) == 4)
    (record,) = tmp_path.glob("outputs/*/*/run.json")
    assert stop.main([str(record.parent)]) == 0
    run.output(code=143)
    assert [(ranks, attempt) for ranks, _, attempt in starts()] == [("2", "0"), ("1", "1"), ("2", "1"), ("2", "1")]
    begun = [int(step) for _, step, _ in starts()]
    assert begun == sorted(set(begun)), "each start continues from what was saved"


@pytest.mark.campaign
def test_too_few_survivors_wait_for_the_workers_that_are_missing(cluster: Cluster, start: Callable[..., Run]) -> None:
    """A run that needs two workers goes on when there is room for one; without room, a stop saves what is left."""
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    run = start("strategy.num_workers=[2,3]", "cluster.autoscaling=true", "train.steps=100000")
    run.wait_for_step(20)
    cluster.remove_node(node, allow_graceful=False)
    run.wait_for(lambda: run.waiting_for("1 worker more (has 1, least 2)"))
    (lost,) = run.events("worker_lost")
    assert f"on {socket.gethostname()} was lost: the node is gone" in lost["reason"]
    node = cluster.add_node(num_cpus=1)
    run.wait_for(lambda: run.events("recovered"))
    assert (run.sizes()[0], run.events("recovered")[0]["steps_lost"]) == ((2, 2, None), 0)

    waits = len(run.events("waiting_for_resources"))
    cluster.remove_node(node, allow_graceful=False)
    run.wait_for(lambda: len(run.events("waiting_for_resources")) > waits)
    summary = run.stop()
    (saved,) = run.events("checkpoint_saved")
    assert saved["step"] == summary["steps"] > run.events("recovered")[0]["step"]


@pytest.mark.campaign
def test_nodes_that_join_later_are_checked_before_a_worker_starts_there(
    cluster: Cluster, start: Callable[..., Run], tmp_path: Path
) -> None:
    """The first ones while the run waits for its workers, the last one while it trains.

    Where other clusters start beside it, Ray was seen to count a CPU of a removed placement group as held for good.
    """
    require_mounts()
    outputs, other, excluded = tmp_path / "outputs", "127.0.0.2", "127.0.0.3"
    words = ("strategy.num_workers=[2,3]", "cluster.autoscaling=true", f"cluster.exclude_nodes=[{excluded}]")
    run = start(*words, "train.steps=100000")
    run.wait_for(lambda: run.events("waiting_for_resources"))
    cluster.add_node(num_cpus=1, node_ip_address=excluded)
    cluster.add_node(num_cpus=1, node_ip_address=other, env_vars=other_torch(tmp_path / "packages"))
    run.wait_for(run.warnings)
    cluster.add_node(num_cpus=1)
    run.wait_for_step(1)
    with node_with_its_own(outputs, cluster.address, lambda: len(cluster.global_state._live_node_ids())):
        run.wait_for(lambda: len(run.warnings()) == 2)
        run.stop()
    in_the_wait, in_training = run.warnings()
    assert f"({other}) has torch 1.0.0, and the driver has" in in_the_wait
    assert in_the_wait.endswith("install the same version there, or leave it out with cluster.exclude_nodes")
    assert f": output_dir {outputs} is not the directory of the driver; use a directory that all" in in_training
    (started,) = run.events("generation_started")
    assert len(started["workers"]) == 2
    assert not any(address in worker for worker in started["workers"] for address in (other, excluded))


@pytest.mark.campaign
def test_without_room_a_run_of_a_fixed_size_ends_with_what_the_survivor_holds(
    cluster: Cluster, start: Callable[..., Run]
) -> None:
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    run = start("strategy.num_workers=2", "train.steps=100000", "cluster.pending_timeout_s=8")
    run.wait_for_step(20)
    cluster.remove_node(node, allow_graceful=False)
    output = run.output(code=1)
    (lost,), (saved,) = run.events("worker_lost"), run.events("checkpoint_saved")
    assert saved["step"] >= lost["step"]
    assert "no room for a worker in place of those that failed within" in output
    assert "the cluster has room for 1 in all" in output
    assert run.summary()["effective_time_pct"] < 90, "the wait for a worker is no training"
    assert f"the newest checkpoint (step {saved['step']}) is at" in output or "a checkpoint is at" in output


@pytest.mark.campaign
def test_an_output_directory_that_a_node_does_not_share_is_refused(
    cluster: Cluster, start: Callable[..., Run], tmp_path: Path
) -> None:
    require_mounts()
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    with node_with_its_own(outputs, cluster.address, lambda: len(cluster.global_state._live_node_ids())):
        output = start("strategy.num_workers=2", "train.steps=30").output(code=1)
    assert f"output_dir={outputs} is not shared: the node {socket.gethostname()} does not see this run there" in output
    assert "Traceback" not in output
    assert not list(outputs.glob("*/*/checkpoints/*"))


@pytest.mark.campaign
def test_with_a_url_every_node_writes_to_a_directory_of_its_own(
    cluster: Cluster, launch: Callable[..., Any], tmp_path: Path
) -> None:
    require_mounts()
    store, staging = tmp_path / "store", tmp_path / "staging"
    staging.mkdir()
    url = (f"output_dir=file://{store}", f"storage.staging_dir={staging}", "storage.upload_every_s=0.5")
    words = [word for word in WORDS if not word.startswith("checkpoint.every")]
    words += ["strategy=pipeline", "strategy.num_workers=2", "recovery.peer_copy_every=0", "checkpoint.every=10"]
    words += ["train.steps=60", "recovery.chaos=[kill@25:0,kill@45:1]", f"cluster.address={cluster.address}"]
    with node_with_its_own(staging, cluster.address, lambda: len(cluster.global_state._live_node_ids())):
        output = Run(launch(*words, *url, RAY_AUTH_MODE="disabled"), tmp_path).output(code=0)
    (stored,) = store.glob("*/*")
    assert f"run directory: file://{stored}" in output
    record = json.loads((stored / "run.json").read_text())
    assert (record["state"], record["summary"]["restarts"]) == ("finished", 2)
    assert 0 < record["summary"]["steps_lost"] < 2 * 25, "it went on from checkpoints on the store"
    points = [json.loads(line) for line in (stored / "metrics.jsonl").read_text().splitlines()]
    assert sorted(p["step"] for p in points if "train/loss" in p) == list(range(1, 61))
    saved = sorted(stored.glob("checkpoints/*/manifest.json"))
    assert saved[-1].parent.name == "step-00000060"
    assert sorted(p.name.partition(".")[0] for p in saved[-1].parent.glob("*-of-*")) == [
        f"{kind}-0000{part}-of-00002" for kind in ("model", "optimizer") for part in (1, 2)
    ]
    of_driver, of_node = sorted(stored.glob("logs/**/*.log"), key=lambda p: len(p.parts))
    assert {of_driver.name, of_node.name} == {"rank-0.log", "rank-1.log"}
    assert of_node.parent.name.startswith(socket.gethostname())
    for log in (of_driver, of_node):
        assert log.read_text().count("worker process ") == 2


@pytest.mark.campaign
def test_with_a_spare_elsewhere_a_lost_node_costs_no_step(cluster: Cluster, start: Callable[..., Run]) -> None:
    """A node has one CPU, so the spare is on no worker's node."""
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    run = start("strategy.num_workers=2", "recovery.spares=1", "train.steps=300")
    run.wait_for_step(30)
    workers = " ".join(run.events("generation_started")[0]["workers"])
    node = next(n for n in nodes if any(f"pid {p}" in workers for p in pids_of(n)))
    cluster.remove_node(node, allow_graceful=False)
    summary = run.finish()
    assert run.sizes() == [(2, 2, None)]
    assert (summary["restarts"], summary["steps_lost"]) == (1, 0)


@pytest.mark.campaign
def test_the_verdict_comes_last_if_the_head_is_lost_for_good(
    launch: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would end the driver, with a line of its own."""
    patience = {RECONNECT_TIMEOUT: "25", "RAY_AUTH_MODE": "disabled"}
    for name, value in patience.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    address = cluster.address
    try:
        words = ("strategy.num_workers=2", "train.steps=100000", "checkpoint.every=10")
        kept = [word for word in WORDS if not word.startswith("checkpoint.every")]
        process = launch(*kept, *words, f"cluster.address={address}", **patience)
        run_dir = wait_for_step(tmp_path, 30)
        cluster.head_node.kill_gcs_server()
        output, _ = process.communicate(timeout=300)
    finally:
        cluster.shutdown()
    assert process.returncode == 1, output
    assert f"failed: the head of the Ray cluster ({address}) has not answered for " in output
    verdict = output[output.index(f"run directory: {run_dir}", output.index("failed: ")) :].splitlines()
    assert [line.partition(":")[0] for line in verdict] == ["run directory", "next", "next"]
    assert f" resume={run_dir}" in verdict[1]
    assert json.loads((run_dir / "run.json").read_text())["state"] == "failed"


@pytest.mark.campaign
def test_a_drained_node_is_left_in_time(cluster: Cluster, start: Callable[..., Run]) -> None:
    leaving = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    run = start("strategy.num_workers=2", "train.steps=300", "recovery.max_failures=0")
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
