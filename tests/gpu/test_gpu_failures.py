"""Failures of ranks that share a GPU: named, and survived."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.gang import Backend
from helpers.runs import events, series
from orchestrator.driver.gang.gang import SHARED_GPU
from orchestrator.records.run_dir import RunDir

STEPS = 24
WORDS = (
    f"train.steps={STEPS}",
    "train.log_every=1",
    "train.precision=fp32",  # the weights of two runs are compared
    "train.eval_every=8",
    "checkpoint.every=8",
    "strategy.num_workers=2",
    "recovery.backoff_s=0.1",
    "recovery.hang_min_s=10",
    "recovery.hang_max_s=30",
    "cluster.stopped_timeout_s=2",
    "recovery.peer_copy_every=4",
    "job.hidden=16",
)
FAILING = ("strategy=ddp", *WORDS, "recovery.max_failures=0")
SOON_S = 60.0
"""Far less than cluster.collective_timeout_s, for which a rank would wait whose peer is lost."""

pytestmark = [pytest.mark.usefixtures("one_gpu_for_all"), pytest.mark.timeout(240)]


def test_an_exception_on_one_rank_is_the_reason(run: Callable[..., Any]) -> None:
    began = time.monotonic()
    result = run(*FAILING, "job._target_=helpers.faulty_jobs.Faulty")
    assert result.status == "FAILED"
    assert result.reason.startswith("rank 1 failed at step 4: RuntimeError: the planted fault")
    assert time.monotonic() - began < SOON_S


def test_a_killed_process_is_the_reason(run: Callable[..., Any]) -> None:
    result = run(*FAILING, "job._target_=helpers.faulty_jobs.Faulty", "job.how=kill")
    assert result.status == "FAILED"
    assert result.reason.startswith("rank 1 failed at step")
    assert "killed by SIGKILL from outside" in result.reason


def test_too_little_memory_is_the_reason(run: Callable[..., Any], backend: Backend) -> None:
    result = run(*FAILING, "job._target_=helpers.gpu_jobs.Greedy")
    assert result.status == "FAILED"
    assert result.reason.startswith("rank 1 failed at step 0: ")
    assert "memory" in result.reason
    if backend.device == "cuda":
        assert "CUDA out of memory: tried to allocate 1048576.00 GiB, with " in result.reason
        assert "largest tensors: " in result.reason
        assert "lower train.global_batch_size=64" in result.reason


def test_a_rank_that_is_slow_to_build_is_not_waited_for_in_a_collective_operation(run: Callable[..., Any]) -> None:
    limits = ("recovery.max_failures=0", "recovery.hang_min_s=10", "recovery.hang_max_s=10")
    slow = ("cluster.collective_timeout_s=41", "job._target_=helpers.faulty_jobs.SlowToBuild", "job.build_s=45")
    result = run("strategy=ddp", "strategy.num_workers=2", "train.steps=2", *limits, *slow)
    assert result.exit_code == 0, result.reason


def test_auto_leaves_a_gpu_for_each_spare(run: Callable[..., Any], one_gpu_for_all: int) -> None:
    result = run("strategy=ddp", "recovery.spares=1", "train.steps=2")
    assert result.exit_code == 0, result.reason
    (started,) = events(result.run_dir, "generation_started")
    assert len(started["workers"]) == one_gpu_for_all - 1


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[str, torch.Tensor]]:
    """The weights of runs without faults, by strategy."""
    return {}


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
@pytest.mark.parametrize("fault", ["kill", "raise", "stop", "exit"])
def test_a_run_continues_with_the_process_that_survived(
    run: Callable[..., Any], undisturbed: dict[str, dict[str, torch.Tensor]], fault: str, strategy: str
) -> None:
    if strategy not in undisturbed:
        result = run(f"strategy={strategy}", *WORDS)
        assert result.exit_code == 0, result.reason
        undisturbed[strategy] = weights(result.run_dir)
    result = run(f"strategy={strategy}", *WORDS, f"recovery.chaos=[{fault}@13:1]")
    assert (result.status, result.summary["restarts"]) == ("FINISHED", 1), result.reason
    assert result.summary["recovery_s"][0] < SOON_S
    if strategy == "ddp":
        assert result.summary["steps_lost"] == 0, "the survivor has made every update that it counts"
    (lost,) = events(result.run_dir, "worker_lost")
    assert lost["rank"] == 1
    first, second = (e["workers"] for e in events(result.run_dir, "generation_started"))
    assert first[0] == second[0], "rank 0 should be the same process"
    torch.testing.assert_close(weights(result.run_dir), undisturbed[strategy], rtol=1e-3, atol=1e-4)


def test_a_rank_that_hangs_is_found_by_what_it_has_not_enqueued(run: Callable[..., Any], backend: Backend) -> None:
    result = run("strategy=ddp", *WORDS, "recovery.chaos=[sleep@13:1]")
    assert (result.status, result.summary["restarts"]) == ("FINISHED", 1), result.reason
    (lost,) = events(result.run_dir, "worker_lost")
    assert lost["rank"] == 1
    assert "no progress for " in lost["reason"]
    records = [RunDir(result.run_dir).flight_file(1, rank) for rank in range(2)]
    if backend.name == "gloo":
        assert "it has not joined the collective operation that the others wait in" in lost["reason"]
        assert not any(record.exists() for record in records)
    else:
        assert re.search(r"it has not enqueued operation \d+ of group \w+ \(nccl:\w+\)", lost["reason"])
        assert all(json.loads(record.read_text())["entries"] for record in records)


@pytest.mark.usefixtures("gpu")
def test_memory_stays_flat_over_three_recoveries(run: Callable[..., Any]) -> None:
    faults = "recovery.chaos=[raise@9:1,raise@13:1,raise@17:1]"
    result = run("strategy=ddp", *WORDS, "job._target_=helpers.gpu_jobs.Observing", faults)
    assert (result.status, result.summary["restarts"]) == ("FINISHED", 3), result.reason
    allocated = series(result.run_dir, "train/allocated_mb")
    assert allocated[STEPS] == pytest.approx(allocated[8], abs=1.0)


@pytest.mark.usefixtures("gpu")
def test_two_workers_on_one_gpu_are_refused(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARED_GPU)
    result = run("strategy=ddp", *WORDS)
    assert result.status == "FAILED"
    assert result.reason.startswith("workers 0 and 1 share one GPU (")
    assert "strategy.num_workers" in result.reason


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors")
