"""Nodes that cannot run workers, machines that are no node, and hostnames that lead elsewhere."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from helpers.machines import commands
from helpers.machines.unfit import other_torch
from helpers.records.runs import events_below
from orchestrator.compat.ray.internals import find_internal
from orchestrator.compat.ray.side_effects import without_services

RUN = ("strategy=ddp", "strategy.num_workers=1", "train.steps=5", "tracking=none")
OTHER = "127.0.0.2"
"""The address of the node that has another torch."""
BUSY = "127.0.0.3"
"""The address of a node that answers nobody for a while."""
METADATA_KEY = "ray._common.usage.usage_constants.CLUSTER_METADATA_KEY"
METADATA_NAMESPACE = "ray._private.ray_constants.KV_NAMESPACE_CLUSTER"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head, and a node on which the metadata of another torch come first."""
    env_vars = other_torch(tmp_path_factory.mktemp("packages"))
    with pytest.MonkeyPatch.context() as patch, without_services():
        patch.setenv("RAY_AUTH_MODE", "disabled")
        stopped_for_long = {"health_check_failure_threshold": 1000}
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": stopped_for_long})
        made.add_node(num_cpus=1, node_ip_address=OTHER, env_vars=env_vars)
        yield made
        made.shutdown()


@pytest.mark.campaign
def test_a_node_with_another_torch_is_refused_by_its_name_or_left_out(cluster: Cluster, tmp_path: Path) -> None:
    words = (*RUN, f"cluster.address={cluster.address}")
    refused = commands.run(*words, cwd=tmp_path, timeout_s=100, RAY_AUTH_MODE="disabled")
    assert refused.returncode == 2, refused.stdout
    assert f"({OTHER}) has torch 1.0.0, and the driver has" in refused.stdout
    assert not list(tmp_path.glob("outputs/*/*"))
    excluding = f"cluster.exclude_nodes=[{OTHER}]"
    done = commands.run(*words, excluding, cwd=tmp_path, timeout_s=100, RAY_AUTH_MODE="disabled")
    assert done.returncode == 0, done.stdout
    (started,) = events_below(tmp_path, "generation_started")
    assert OTHER not in started["workers"][0]


@pytest.fixture
def stopped(cluster: Cluster) -> Iterator[psutil.Process]:
    """The raylet of a third node, which is up and answers nobody."""
    node = cluster.add_node(num_cpus=1, node_ip_address=BUSY)
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    raylet.suspend()
    yield raylet
    raylet.resume()
    cluster.remove_node(node)


@pytest.mark.campaign
def test_a_node_that_is_slow_to_answer_is_waited_for(
    cluster: Cluster, stopped: psutil.Process, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    words = (*RUN, f"cluster.address={cluster.address}", f"cluster.exclude_nodes=[{OTHER}]")
    run = launch(*words, RAY_AUTH_MODE="disabled")
    assert run.stdout is not None
    lines = iter(run.stdout.readline, "")
    waiting = next((line for line in lines if line.startswith("waiting ")), "")
    assert re.fullmatch(rf"waiting \d+s for the report of \S+ \({BUSY}\): a process has to start there\n", waiting)
    stopped.resume()
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output


@pytest.mark.campaign
def test_a_node_that_never_answers_is_refused(cluster: Cluster, stopped: psutil.Process, tmp_path: Path) -> None:
    words = (*RUN, f"cluster.address={cluster.address}", f"cluster.exclude_nodes=[{OTHER}]")
    refused = commands.run(*words, "cluster.pending_timeout_s=8", cwd=tmp_path, timeout_s=100, RAY_AUTH_MODE="disabled")
    assert refused.returncode == 2, refused.stdout
    late = re.escape(" did not answer within 8 s (cluster.pending_timeout_s); see the load")
    # On a busy machine, the other node may be late, too.
    assert re.search(rf"\({BUSY}\).*{late}", refused.stdout), refused.stdout


@pytest.mark.campaign
def test_a_cluster_with_other_versions_is_refused_with_both_and_the_remedy(cluster: Cluster, tmp_path: Path) -> None:
    """Ray compares its own versions with those that the GCS server stores."""
    gcs = cluster.head_node.get_gcs_client()
    key, namespace = map(find_internal, (METADATA_KEY, METADATA_NAMESPACE))
    stored = gcs.internal_kv_get(key, namespace)
    others = json.dumps(json.loads(stored) | {"ray_version": "2.50.1", "python_version": "3.9.7"})
    gcs.internal_kv_put(key, others.encode(), True, namespace)
    try:
        words = (*RUN, f"cluster.address={cluster.address}")
        refused = commands.run(*words, cwd=tmp_path, timeout_s=60, RAY_AUTH_MODE="disabled")
    finally:
        gcs.internal_kv_put(key, stored, True, namespace)
    assert refused.returncode == 2, refused.stdout
    here = f"Ray {ray.__version__} and Python {platform.python_version()}"
    assert f"the cluster has Ray 2.50.1 and Python 3.9.7, this process {here}; use the environment" in refused.stdout
    assert "Traceback" not in refused.stdout


@pytest.mark.campaign
def test_the_doctor_names_the_node_and_measures_the_network(cluster: Cluster, tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "orchestrator.doctor",
        "--json",
        f"cluster.address={cluster.address}",
        "tracking=none",
        "job._target_=installed_by_pip.Mine",
        "cluster.pip=[installed-by-pip]",
    ]
    environment = commands.environment(RAY_AUTH_MODE="disabled")
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    found = json.loads(done.stdout)
    faults = {f["check"]: f for f in found if f["level"] == "fault"}
    assert "installed_by_pip" not in done.stdout, "the package is not there before a launch"
    assert done.returncode == 2, done.stderr
    assert faults.keys() == {"versions", "interface"}
    assert faults["versions"]["text"].startswith("torch 1.0.0")
    assert OTHER in faults["versions"]["where"][0]
    checks = {f["check"]: f for f in found}
    assert "all-reduce across 2 processes of one node with gloo (127.0.0.1): " in checks["network"]["text"]
    assert checks.keys() >= {"versions", "Ray", "token", "output_dir", "tracking", "GPUs", "interface", "clock", "data"}
    assert checks["token"]["level"] == "warning"
    assert not (tmp_path / "outputs").exists()


@pytest.mark.campaign
def test_a_machine_that_is_no_node_is_told_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """In a namespace of processes of its own, in which no raylet runs."""
    alone = namespace("-pf", "--mount-proc")
    environment = commands.environment(RAY_AUTH_MODE="disabled")
    words = [*alone, sys.executable, "-m", "orchestrator.launch", *RUN, f"cluster.address={cluster.address}"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "this machine is no node of that cluster" in done.stderr
    assert "`orchestrator submit`" in done.stderr


@pytest.mark.campaign
def test_an_embedded_ray_does_not_need_the_hostname(tmp_path: Path) -> None:
    """Without a network, Ray asks which address the hostname has; here that of another machine."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.99.99.99 stranger\n")
    setup = 'mount --bind hosts /etc/hosts && hostname stranger && ip link set lo up && exec "$@"'
    words = [*namespace("-nmu"), "sh", "-c", setup, "sh", sys.executable, "-m", "orchestrator.launch", *RUN]
    done = subprocess.run(words, cwd=tmp_path, env=commands.environment(), capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished: 5 steps" in done.stdout


def namespace(*options: str) -> Sequence[str]:
    """``unshare`` with these options; skips the test without the right to it."""
    if os.uname().sysname != "Linux" or shutil.which("ip") is None:
        pytest.skip("needs Linux and iproute2")
    words = ["unshare", "-r", *options]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"no right to unshare {' '.join(options)}")
    return words
