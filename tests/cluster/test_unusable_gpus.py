"""GPUs that Ray counts and torch cannot use: a run on GPUs is refused, and a run on any device trains on CPUs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ray.cluster_utils import Cluster

from helpers.runs import events_below


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A node that counts two GPUs which do not exist. It asks for no token, although this user may have one."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2})
    yield cluster.address
    cluster.shutdown()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPUs exist")
def test_a_run_on_gpus_is_refused_and_one_on_any_device_warns(
    launch: Callable[..., subprocess.Popen[str]], address: str, tmp_path: Path
) -> None:
    words = ("strategy=ddp", "tracking=none", "train.steps=2", f"cluster.address={address}")
    refused = launch(*words, "cluster.device=cuda", RAY_AUTH_MODE="disabled")
    output, _ = refused.communicate(timeout=60)
    assert refused.returncode == 1, output
    assert "cluster.device=cuda: 2 of 2 workers cannot use their GPU: " in output
    assert ", GPU 0: " in output
    assert events_below(tmp_path, "generation_started") == []
    warned = launch(*words, RAY_AUTH_MODE="disabled")
    output, _ = warned.communicate(timeout=60)
    assert warned.returncode == 0, output
    assert "no worker can use the GPU that Ray has given it (GPU " in output
    (started,) = events_below(tmp_path, "generation_started")
    assert (started["backend"], started["device"]) == ("gloo", "cpu")
