"""Whole runs on a GPU that each worker has for itself."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from helpers.machines.commands import environment
from helpers.ranks.gang import Backend
from helpers.records.runs import events, losses, series
from orchestrator.records.run_dir import RunDir
from orchestrator.state.checkpoint import load
from orchestrator.worker.process import network

STEPS = 12
WORDS = (
    f"train.steps={STEPS}",
    "train.log_every=1",
    "checkpoint.every=6",
    "job._target_=helpers.jobs.gpu_jobs.Observing",
)


def test_one_worker_trains_from_the_command_to_the_checkpoint(run: Callable[..., Any], backend: Backend) -> None:
    """If it fails, the basic path from the command to a checkpoint does not use the GPU."""
    result = run("cluster=local", "strategy=single", *WORDS)
    assert (result.status, result.exit_code) == ("FINISHED", 0), result.reason
    (started,) = events(result.run_dir, "generation_started")
    assert (started["backend"], started["device"]) == (backend.name, backend.device)
    on_gpu = backend.device == "cuda"
    has_bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    precision = "bf16" if has_bf16 else "fp32"
    assert started["precision"] == RunDir(result.run_dir).read_record()["precision"] == precision
    assert len(losses(result.run_dir)) == STEPS
    assert set(series(result.run_dir, "train/on_gpu").values()) == {float(on_gpu)}
    if on_gpu:
        assert set(series(result.run_dir, "train/visible_devices").values()) == {1.0}
        assert " gpu " in started["workers"][0]
    assert load(result.run_dir / "checkpoints" / f"step-{STEPS:08d}").meta["step"] == STEPS


def test_a_strategy_for_cpus_leaves_the_gpu_unused(run: Callable[..., Any]) -> None:
    """If it fails, a strategy for CPUs takes a GPU from others."""
    result = run("cluster=local", "strategy=hogwild", "train.steps=2")
    assert result.exit_code == 0, result.reason
    (started,) = events(result.run_dir, "generation_started")
    assert started["device"] == "cpu"
    assert not any(" gpu " in worker for worker in started["workers"])


def test_nccl_gets_the_interface_of_the_node_and_the_variables_of_the_shell(
    run: Callable[..., Any], backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, NCCL chooses an interface of its own, or ignores the user's settings."""
    names = (network.GLOO, network.NCCL, "NCCL_DEBUG", "NCCL_NVLS_ENABLE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    job = ("job._target_=helpers.jobs.faulty_jobs.Environed", f"job.variables=[{','.join(names)}]")
    result = run("cluster=local", "strategy=single", "train.steps=2", *job)
    assert result.exit_code == 0, result.reason
    log = RunDir(result.run_dir).log_file(0).read_text()
    interface, nvls = ("=lo", "0") if backend.name == "nccl" else (None, None)
    assert f"GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME={interface} NCCL_DEBUG=WARN NCCL_NVLS_ENABLE={nvls}" in log


@pytest.mark.usefixtures("gpu")
def test_the_doctor_computes_on_the_gpus_that_ray_manages(tmp_path: Path) -> None:
    """If it fails, the doctor excludes a machine because of a GPU that the user has hidden."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.doctor", "cluster=local", f"output_dir={tmp_path}"],
        cwd=tmp_path,
        env=environment(CUDA_VISIBLE_DEVICES=device),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    (line,) = [line for line in done.stdout.splitlines() if " GPUs " in line]
    assert line.startswith("OK "), done.stdout
    assert ": 1 x " in line


@pytest.mark.usefixtures("gpu")
def test_workers_have_a_gpu_each(run: Callable[..., Any]) -> None:
    """If it fails, two workers see the same GPU, or ranks do not follow the GPUs."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs 2 GPUs")
    result = run("cluster=local", "strategy=ddp", *WORDS)
    assert result.exit_code == 0, result.reason
    (started,) = events(result.run_dir, "generation_started")
    numbers = [int(worker.partition(" gpu ")[2].partition(" ")[0]) for worker in started["workers"]]
    assert numbers == list(range(count))
    assert set(series(result.run_dir, "train/visible_devices").values()) == {1.0}


@pytest.mark.usefixtures("gpu")
def test_the_gpus_of_the_node_are_measured(run: Callable[..., Any]) -> None:
    """If it fails, NVML does not give the readings that MLflow shows."""
    pytest.importorskip("pynvml", reason="needs pip install nvidia-ml-py")
    words = (
        "tracking.system_metrics_every_s=0.5",
        "job._target_=helpers.jobs.leisurely_job.Leisurely",
        "job.pause_ms=100",
    )
    result = run("cluster=local", "strategy=single", "train.steps=40", *words)
    assert result.exit_code == 0, result.reason
    text = (result.run_dir / "metrics.jsonl").read_text()
    for name in ("utilization_percentage", "memory_usage_megabytes", "power_usage_watts"):
        assert f"/gpu_0_{name}" in text


@pytest.fixture
def ray_with_one_gpu_too_many() -> Iterator[int]:
    """The number of GPUs of a Ray that counts one more than there are."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        pytest.skip("Ray counts no more GPUs than CUDA_VISIBLE_DEVICES lists; unset it")
    count = torch.cuda.device_count() + 1
    ray.init(
        address="local",
        num_cpus=count,
        num_gpus=count,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield count
    ray.shutdown()


def test_a_gpu_that_cannot_be_used_is_named(
    run: Callable[..., Any], backend: Backend, ray_with_one_gpu_too_many: int
) -> None:
    """If it fails, a broken GPU ends a run without its name, or makes it train on CPUs."""
    count = ray_with_one_gpu_too_many
    for device in ("cuda", "auto") if backend.device == "cuda" else ("cuda",):
        result = run("strategy=ddp", f"strategy.num_workers={count}", f"cluster.device={device}", "train.steps=2")
        assert result.status == "FAILED"
        expected = f"cluster.device={device}: 1 of {count} workers cannot use their GPU: "
        assert result.reason.startswith(expected), result.reason
        assert f", GPU {count - 1}: " in result.reason
        assert events(result.run_dir, "generation_started") == []
