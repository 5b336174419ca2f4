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

from helpers.faults.check import WORDS, checked, merged
from helpers.faults.layouts import COPIES, Tolerance
from helpers.faults.table import STEPS, Row, grouped
from helpers.jobs.gpu_jobs import COMMUNICATOR_MB
from helpers.machines.commands import environment
from helpers.ranks.gang import Backend
from helpers.records.runs import events, series
from orchestrator.driver.gang.gang import SHARED_GPU
from orchestrator.protocol.messages import SHOW_ALL_GPUS
from orchestrator.records.run_dir import RunDir

COMMON = merged(
    *WORDS,
    "train.precision=fp32",  # the weights of two runs are compared
    "recovery.hang_min_s=10",
    "recovery.hang_max_s=30",
    "cluster.stopped_timeout_s=2",
    COPIES,
)
TWO = (*COMMON, "strategy.num_workers=2")
FAILING = ("strategy=ddp", *TWO, "recovery.max_failures=0")
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


SOURCES = {
    "ddp": "in place",
    "ddp, divided optimizer": "copies",
    "fsdp": "copies",
    "pipeline": "copies",
    "ddp_pipeline": "in place",
    "hsdp": "in place",
}
"""By layout; on each rank, the last two have a communicator of all ranks and one for each dimension of the mesh."""


def row(layout: str, faults: str, *steps: tuple[int, ...], source: str = "in place", **more: Any) -> Row:
    return Row(layout=layout, faults=grouped(faults), source=source, steps=steps, **more)


@pytest.fixture
def recovered(run: Callable[..., Any]) -> Callable[..., Any]:
    """``recovered(row)``: a run that recovers soon, and keeps the promises of the row."""

    def check(row: Row) -> Any:
        result = checked(run, row, COMMON, tolerance=Tolerance(losses=1e-3, rtol=1e-3, atol=1e-4))
        assert max(result.summary["recovery_s"]) < SOON_S
        return result

    return check


@pytest.mark.parametrize("layout", SOURCES)
@pytest.mark.parametrize("fault", ["kill", "raise", "stop", "exit"])
def test_a_run_continues_with_the_process_that_survived(recovered: Callable[..., Any], fault: str, layout: str) -> None:
    """If it fails, a survivor cannot abort its communicators and form new ones, or it has made a wrong update."""
    source = SOURCES[layout]
    recovered(row(layout, f"{fault}@13:1", (12,) if source == "in place" else (8, 12), source=source))


@pytest.mark.parametrize("phase", ["0:1:join", "0:1:connect", "0:1:build", "8:1:eval", "8:0:checkpoint"])
def test_a_run_continues_after_a_death_outside_of_a_step(recovered: Callable[..., Any], phase: str) -> None:
    """If it fails, ranks that connect, build, evaluate or save cannot be freed or replaced when another one dies."""
    step = int(phase[0])
    result = recovered(row("ddp", f"kill@{phase}", (step,), source="in place" if step else "start"))
    notes = [e["message"] for e in events(result.run_dir, "noted") if "were connecting with NCCL" in e["message"]]
    assert not notes or phase.endswith("connect")


def test_a_run_survives_several_faults_in_succession(recovered: Callable[..., Any]) -> None:
    """If it fails, something of an earlier group is left: a lock, a communicator or a watchdog of torch."""
    recovered(row("ddp", "raise@6:1 kill@11:0 stop@16:1 kill@21:1", (5,), (10,), (15,), (20,)))


def test_a_spare_takes_the_rank_of_a_lost_worker(recovered: Callable[..., Any]) -> None:
    """If it fails, a process that has loaded the job and joined no group cannot use NCCL later."""
    recovered(row("ddp with a spare", "kill@13:1", (12,)))


def failing_once(how: str) -> Row:
    """Rank 1 fails by itself in step 13."""
    job = ("job._target_=helpers.jobs.gpu_jobs.FailingOnce", f"job.how={how}")
    return row("ddp", "raise@13:1", (12,), words=job, injected=False)


def test_too_little_memory_in_the_middle_of_a_run_costs_one_worker(recovered: Callable[..., Any]) -> None:
    """If it fails, a rank that runs out of memory takes the others with it, or is not replaced."""
    (lost,) = events(recovered(failing_once("memory")).run_dir, "worker_lost")
    assert "memory" in lost["reason"]


@pytest.mark.usefixtures("gpu")
def test_an_error_of_the_device_is_named_and_costs_one_worker(recovered: Callable[..., Any]) -> None:
    """If it fails, torch's watchdog ends the process before Python has said why, or the broken process is kept."""
    (lost,) = events(recovered(failing_once("assert")).run_dir, "worker_lost")
    assert "CUDA error: device-side assert" in lost["reason"]


@pytest.mark.usefixtures("gpu")
def test_a_kernel_that_never_ends_does_not_end_the_run(run: Callable[..., Any]) -> None:
    """If it fails, the process with that kernel is kept, or the abort of a communicator waits for the kernel."""
    job = ("job._target_=helpers.jobs.gpu_jobs.FailingOnce", "job.how=spin")
    result = run("strategy=ddp", *TWO, *job)
    assert result.status == "FINISHED", result.reason
    assert result.summary["restarts"] >= 1


@pytest.mark.usefixtures("gpu")
def test_a_gigabyte_of_state_is_recovered(run: Callable[..., Any]) -> None:
    """If it fails, the transfer of a large state to a new worker takes too long or too much memory."""
    sizes = ("job._target_=helpers.jobs.quick_jobs.AdamDigits", "job.hidden=6600", "job.depth=3", "train.eval_every=0")
    large = [w for w in TWO if not w.startswith(("job.hidden", "train.eval_every"))]
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
        [sys.executable, "-c", SILENT_DRIVER, *TWO, *job],
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


def test_a_rank_that_hangs_is_found_by_what_it_has_not_enqueued(
    recovered: Callable[..., Any], backend: Backend
) -> None:
    """If it fails, torch's flight recorder has changed, and an innocent rank is killed for a hang."""
    result = recovered(row("ddp", "sleep@13:1", (12,)))
    (lost,) = events(result.run_dir, "worker_lost")
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
    result = recovered(row("pipeline", "raise@10:1 sleep@17:1", (4, 8), (12, 16), source="copies"))
    _, hung = events(result.run_dir, "worker_lost")
    if backend.name == "nccl":
        assert "it has not enqueued " in hung["reason"]


@pytest.mark.usefixtures("gpu")
def test_memory_stays_flat_over_three_recoveries(recovered: Callable[..., Any]) -> None:
    """If it fails, a recovery leaves tensors, or communicators outside of torch's allocator, on the GPU."""
    job = ("job._target_=helpers.jobs.gpu_jobs.Observing",)
    result = recovered(row("ddp", "raise@9:1 raise@13:1 raise@17:1", (8,), (12,), (16,), words=job))
    allocated = series(result.run_dir, "train/allocated_mb")
    assert allocated[STEPS] == pytest.approx(allocated[8], abs=1.0)
    outside = series(result.run_dir, "train/outside_mb")
    assert outside[STEPS] < outside[8] + COMMUNICATOR_MB


@pytest.mark.usefixtures("gpu")
def test_two_workers_on_one_gpu_are_refused(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, NCCL refuses the GPU that two workers share, with a text that names no remedy."""
    monkeypatch.delenv(SHARED_GPU)
    result = run("strategy=ddp", *TWO)
    assert result.status == "FAILED"
    assert result.reason.startswith("workers 0 and 1 share one GPU (")
    assert SHOW_ALL_GPUS in result.reason
