"""Failures of ranks that share a GPU: named, and survived."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.jobs.gpu_jobs import COMMUNICATOR_MB
from helpers.machines.commands import environment
from helpers.ranks.gang import Backend
from helpers.records.runs import events, series
from orchestrator.driver.gang.gang import SHARED_GPU
from orchestrator.protocol.messages import SHOW_ALL_GPUS
from orchestrator.records.run_dir import RunDir
from orchestrator.state.checkpoint import load, path_of

STEPS = 24
COMMON = (
    f"train.steps={STEPS}",
    "train.log_every=1",
    "train.precision=fp32",  # the weights of two runs are compared
    "train.eval_every=8",
    "checkpoint.every=8",
    "recovery.backoff_s=0.1",
    "recovery.hang_min_s=10",
    "recovery.hang_max_s=30",
    "cluster.stopped_timeout_s=2",
    "recovery.peer_copy_every=4",
    "job.hidden=16",
)
WORDS = (*COMMON, "strategy.num_workers=2")
FAILING = ("strategy=ddp", *WORDS, "recovery.max_failures=0")
SOON_S = 60.0
"""Far less than cluster.collective_timeout_s, for which a rank would wait whose peer is lost."""

pytestmark = [pytest.mark.usefixtures("one_gpu_for_all"), pytest.mark.timeout(240)]


def test_an_exception_on_one_rank_is_the_reason(run: Callable[..., Any]) -> None:
    """If it fails, the others wait for a rank that has raised, or are blamed."""
    began = time.monotonic()
    result = run(*FAILING, "job._target_=helpers.jobs.faulty_jobs.Faulty")
    assert result.status == "FAILED"
    assert result.reason.startswith("rank 1 failed at step 4: RuntimeError: the planted fault")
    assert time.monotonic() - began < SOON_S


def test_a_killed_process_is_the_reason(run: Callable[..., Any]) -> None:
    """If it fails, the others wait for a rank that has died, or are blamed."""
    result = run(*FAILING, "job._target_=helpers.jobs.faulty_jobs.Faulty", "job.how=kill")
    assert result.status == "FAILED"
    assert result.reason.startswith("rank 1 failed at step")
    assert "killed by SIGKILL from outside" in result.reason


def test_too_little_memory_is_the_reason(run: Callable[..., Any], backend: Backend) -> None:
    """If it fails, a user who lacks memory does not learn what takes it and which keys help."""
    result = run(*FAILING, "job._target_=helpers.jobs.gpu_jobs.Greedy")
    assert result.status == "FAILED"
    assert result.reason.startswith("rank 1 failed at step 0: ")
    assert "memory" in result.reason
    if backend.device == "cuda":
        assert "CUDA out of memory: tried to allocate 1048576.00 GiB, with " in result.reason
        assert "largest tensors: " in result.reason
        assert "lower train.global_batch_size=64" in result.reason


def test_a_rank_that_is_slow_to_build_is_not_waited_for_in_a_collective_operation(run: Callable[..., Any]) -> None:
    """If it fails, a large model on a slow disk ends the run by the timeout of NCCL."""
    limits = ("recovery.max_failures=0", "recovery.hang_min_s=10", "recovery.hang_max_s=10")
    slow = ("cluster.collective_timeout_s=41", "job._target_=helpers.jobs.faulty_jobs.SlowToBuild", "job.build_s=45")
    result = run("strategy=ddp", "strategy.num_workers=2", "train.steps=2", *limits, *slow)
    assert result.exit_code == 0, result.reason


def test_auto_leaves_a_gpu_for_each_spare(run: Callable[..., Any], one_gpu_for_all: int) -> None:
    """If it fails, all GPUs are taken, and a spare cannot start."""
    result = run("strategy=ddp", "recovery.spares=1", "train.steps=2")
    assert result.exit_code == 0, result.reason
    (started,) = events(result.run_dir, "generation_started")
    assert len(started["workers"]) == one_gpu_for_all - 1


STRATEGIES = {
    "ddp": ("strategy=ddp", "strategy.num_workers=2"),
    "ddp, divided optimizer": ("strategy=ddp", "strategy.shard_optimizer=true", "strategy.num_workers=2"),
    "fsdp": ("strategy=fsdp", "strategy.num_workers=2"),
    "pipeline": ("strategy=pipeline", "strategy.num_workers=2"),
    "ddp_pipeline": ("strategy=ddp_pipeline", "strategy.pipeline_parallel_size=2", "strategy.num_workers=4"),
    "hsdp": ("strategy=hsdp", "strategy.shard_size=2", "strategy.num_workers=4"),
}
"""By name; on each rank, the last two have a communicator of all ranks and one for each dimension of the mesh."""
LOSES_NO_STEP = ("ddp", "ddp_pipeline", "hsdp")


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[str, torch.Tensor]]:
    """The weights of runs without faults, by strategy."""
    return {}


@pytest.fixture
def recovered(run: Callable[..., Any], undisturbed: dict[str, dict[str, torch.Tensor]]) -> Callable[..., Any]:
    """``recovered("ddp", "recovery.chaos=[kill@13:1]")``: a run that ends with the weights of an undisturbed one."""

    def run_and_compare(strategy: str, *words: str, failures: int = 1) -> Any:
        if strategy not in undisturbed:
            result = run(*COMMON, *STRATEGIES[strategy])
            assert result.exit_code == 0, result.reason
            undisturbed[strategy] = weights(result.run_dir)
        result = run(*COMMON, *STRATEGIES[strategy], *words)
        assert (result.status, result.summary["restarts"]) == ("FINISHED", failures), result.reason
        assert max(result.summary["recovery_s"]) < SOON_S
        torch.testing.assert_close(weights(result.run_dir), undisturbed[strategy], rtol=1e-3, atol=1e-4)
        return result

    return run_and_compare


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fault", ["kill", "raise", "stop", "exit"])
def test_a_run_continues_with_the_process_that_survived(
    recovered: Callable[..., Any], fault: str, strategy: str
) -> None:
    """If it fails, a survivor cannot abort its communicators and form new ones, or it has made a wrong update."""
    result = recovered(strategy, f"recovery.chaos=[{fault}@13:1]")
    if strategy in LOSES_NO_STEP:
        assert result.summary["steps_lost"] == 0, "the survivor has made every update that it counts"
    (lost,) = events(result.run_dir, "worker_lost")
    assert lost["rank"] == 1
    first, second = (e["workers"] for e in events(result.run_dir, "generation_started"))
    assert first[0] == second[0], "rank 0 should be the same process"


@pytest.mark.parametrize("phase", ["0:1:join", "0:1:connect", "0:1:build", "8:1:eval", "8:0:checkpoint"])
def test_a_run_continues_after_a_death_outside_of_a_step(recovered: Callable[..., Any], phase: str) -> None:
    """If it fails, ranks that connect, build, evaluate or save cannot be freed or replaced when another one dies."""
    result = recovered("ddp", f"recovery.chaos=[kill@{phase}]")
    notes = [e["message"] for e in events(result.run_dir, "noted") if "were connecting with NCCL" in e["message"]]
    assert not notes or phase.endswith("connect")


def test_a_run_survives_several_faults_in_succession(recovered: Callable[..., Any]) -> None:
    """If it fails, something of an earlier group is left: a lock, a communicator or a watchdog of torch."""
    result = recovered("ddp", "recovery.chaos=[raise@6:1,kill@11:0,stop@16:1,kill@21:1]", failures=4)
    assert result.summary["steps_lost"] == 0


def test_a_spare_takes_the_rank_of_a_lost_worker(recovered: Callable[..., Any]) -> None:
    """If it fails, a process that has loaded the job and joined no group cannot use NCCL later."""
    result = recovered("ddp", "recovery.spares=1", "recovery.chaos=[kill@13:1]")
    assert result.summary["steps_lost"] == 0


def test_too_little_memory_in_the_middle_of_a_run_costs_one_worker(recovered: Callable[..., Any]) -> None:
    """If it fails, a rank that runs out of memory takes the others with it, or is not replaced."""
    result = recovered("ddp", "job._target_=helpers.jobs.gpu_jobs.FailingOnce", "job.how=memory")
    (lost,) = events(result.run_dir, "worker_lost")
    assert (lost["rank"], "memory" in lost["reason"]) == (1, True)


@pytest.mark.usefixtures("gpu")
def test_an_error_of_the_device_is_named_and_costs_one_worker(recovered: Callable[..., Any]) -> None:
    """If it fails, torch's watchdog ends the process before Python has said why, or the broken process is kept."""
    result = recovered("ddp", "job._target_=helpers.jobs.gpu_jobs.FailingOnce", "job.how=assert")
    (lost,) = events(result.run_dir, "worker_lost")
    assert (lost["rank"], "CUDA error: device-side assert" in lost["reason"]) == (1, True), lost["reason"]


@pytest.mark.usefixtures("gpu")
def test_a_kernel_that_never_ends_does_not_end_the_run(run: Callable[..., Any]) -> None:
    """If it fails, the process with that kernel is kept, or the abort of a communicator waits for the kernel."""
    job = ("job._target_=helpers.jobs.gpu_jobs.FailingOnce", "job.how=spin")
    result = run("strategy=ddp", *WORDS, *job)
    assert result.status == "FINISHED", result.reason
    assert result.summary["restarts"] >= 1


@pytest.mark.usefixtures("gpu")
def test_a_gigabyte_of_state_is_recovered(run: Callable[..., Any]) -> None:
    """If it fails, the transfer of a large state to a new worker takes too long or too much memory."""
    sizes = ("job._target_=helpers.jobs.quick_jobs.AdamDigits", "job.hidden=6600", "job.depth=3", "train.eval_every=0")
    large = [w for w in WORDS if not w.startswith(("job.hidden", "train.eval_every"))]
    result = run("strategy=ddp", *large, *sizes, "recovery.chaos=[kill@13:1]")
    assert (result.status, result.summary["restarts"]) == ("FINISHED", 1), result.reason
    assert result.summary["steps_lost"] == 0
    assert result.summary["recovery_s"][0] < SOON_S


SILENT_DRIVER = """
import os, sys
from helpers.machines.shared_gpu import shared_gpu_ray
from orchestrator import run

with shared_gpu_ray(2):
    result = run(["tracking=none", *sys.argv[1:], f"job.driver={os.getpid()}"])
print(result.status, result.summary["restarts"], result.summary["steps_lost"], result.reason)
"""


def test_a_rank_that_fails_waits_for_a_driver_that_is_silent(tmp_path: Path) -> None:
    """If it fails, a rank aborts without the driver's word, and its peers may take garbage for gradients."""
    job = ("job._target_=helpers.jobs.gpu_jobs.FailingOnce", "job.how=silent", "strategy=ddp")
    done = subprocess.run(
        [sys.executable, "-c", SILENT_DRIVER, *WORDS, *job],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        start_new_session=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("FINISHED 1 0"), done.stdout


def test_a_rank_that_hangs_is_found_by_what_it_has_not_enqueued(run: Callable[..., Any], backend: Backend) -> None:
    """If it fails, torch's flight recorder has changed, and an innocent rank is killed for a hang."""
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


def test_a_rank_that_hangs_in_messages_is_found_after_a_recovery(
    recovered: Callable[..., Any], backend: Backend
) -> None:
    """If it fails, the flight recorder does not know the ranks of the default group after the first generation."""
    result = recovered("pipeline", "recovery.chaos=[raise@6:1,sleep@16:1]", failures=2)
    _, hung = events(result.run_dir, "worker_lost")
    assert hung["rank"] == 1
    if backend.name == "nccl":
        assert "it has not enqueued " in hung["reason"]


@pytest.mark.usefixtures("gpu")
def test_memory_stays_flat_over_three_recoveries(run: Callable[..., Any]) -> None:
    """If it fails, a recovery leaves tensors, or communicators outside of torch's allocator, on the GPU."""
    faults = "recovery.chaos=[raise@9:1,raise@13:1,raise@17:1]"
    result = run("strategy=ddp", *WORDS, "job._target_=helpers.jobs.gpu_jobs.Observing", faults)
    assert (result.status, result.summary["restarts"]) == ("FINISHED", 3), result.reason
    allocated = series(result.run_dir, "train/allocated_mb")
    assert allocated[STEPS] == pytest.approx(allocated[8], abs=1.0)
    outside = series(result.run_dir, "train/outside_mb")
    assert outside[STEPS] < outside[8] + COMMUNICATOR_MB


@pytest.mark.usefixtures("gpu")
def test_two_workers_on_one_gpu_are_refused(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, NCCL refuses the GPU that two workers share, with a text that names no remedy."""
    monkeypatch.delenv(SHARED_GPU)
    result = run("strategy=ddp", *WORDS)
    assert result.status == "FAILED"
    assert result.reason.startswith("workers 0 and 1 share one GPU (")
    assert SHOW_ALL_GPUS in result.reason


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return dict(load(path_of(run_dir / "checkpoints", STEPS)).model)
