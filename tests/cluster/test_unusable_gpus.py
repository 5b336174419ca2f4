"""GPUs that Ray counts and torch cannot use.

A run on GPUs is refused, and a run on any device trains on CPUs.
"""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ray.cluster_utils import Cluster

from helpers.records.runs import events_below
from orchestrator.compat.ray.side_effects import without_services

WORDS = ("tracking=none", "train.steps=2", "cluster.env.GLOO_SOCKET_IFNAME=lo", "cluster.env.NCCL_SOCKET_IFNAME=lo")
OTHER = "127.0.0.2"
"""The address of the node with one GPU."""
NODE_BY_NODE = ([True, False, False], [False, False, True])
"""For each rank, whether it is on the other node: in the order of the addresses of the nodes."""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPUs exist")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A Ray with two GPUs that asks for no token, although this user may have one."""
    with pytest.MonkeyPatch.context() as patch, without_services():
        patch.setenv("RAY_AUTH_MODE", "disabled")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2})
        yield made
        made.shutdown()


def on_other_node(folder: Path) -> list[bool]:
    """Whether each rank of the run below ``folder`` is on the other node."""
    (started,) = events_below(folder, "generation_started")
    assert (started["backend"], started["device"]) == ("gloo", "cpu")
    return [OTHER in worker for worker in started["workers"]]


@pytest.mark.campaign
def test_a_run_on_gpus_is_refused_and_one_on_any_device_warns(
    launch: Callable[..., subprocess.Popen[str]], cluster: Cluster, tmp_path: Path
) -> None:
    words = (*WORDS, "strategy=single", f"cluster.address={cluster.address}")
    refused = launch(*words, "cluster.device=cuda", RAY_AUTH_MODE="disabled")
    output, _ = refused.communicate(timeout=300)
    assert refused.returncode == 1, output
    assert "cluster.device=cuda: 1 of 1 workers cannot use their GPU: " in output
    assert ", GPU 0: " in output
    assert events_below(tmp_path, "generation_started") == []
    warned = launch(*words, RAY_AUTH_MODE="disabled")
    output, _ = warned.communicate(timeout=300)
    assert warned.returncode == 0, output
    assert "no worker can use the GPU that Ray has given it (GPU " in output
    assert on_other_node(tmp_path) == [False]


@pytest.mark.campaign
def test_the_stages_of_a_pipeline_have_gpus_of_uneven_nodes(
    launch: Callable[..., subprocess.Popen[str]], cluster: Cluster, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=1, num_gpus=1, node_ip_address=OTHER)
    staged = ("strategy=ddp_pipeline", "strategy.pipeline_parallel_size=3")
    words = (*WORDS, *staged, f"cluster.address={cluster.address}")
    run = launch(*words, RAY_AUTH_MODE="disabled")
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    assert on_other_node(tmp_path) in NODE_BY_NODE
