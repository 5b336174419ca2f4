"""The arms of a benchmark: ways to run the same training, each a command line with an empty directory of its own."""

from __future__ import annotations

import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from orchestrator.records.journal import read_lines
from orchestrator.records.run_dir import RunDir

HERE = Path(__file__).resolve().parents[1]
RESULTS = HERE / "results"
PEERS = HERE / "peers"
WORKERS = 2
WARM_UP_STEPS = 10
"""Every arm excludes this many steps from its rates, or a fifth of a short run; the orchestrator excludes as many."""
ARM_TIMEOUT_S = 240
RAY_START_TIMEOUT_S = 60

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{HERE.parent}:{PEERS}",
    "RAY_worker_niceness": "0",  # Ray's default of 15 would handicap its workers against torchrun's
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
"""Variables set alike for every arm."""

UNSET = ("PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS")
"""Variables removed for every arm. Arms may cache bytecode, as they would in normal use."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training job, the same for every arm. ``fields`` are those of the job's dataclass."""

    job: str
    fields: Mapping[str, Any]
    steps: int
    global_batch_size: int
    log_every: int


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one run of an arm took. Fields without a description are about rank 0's steps after warm-up.

    Attributes:
        startup_s: the time from process start to the end of the first step.
        startup: its parts; empty for the peers.
        data_wait_pct: the share of a step that it waited for samples, in the median; None for the peers.
    """

    startup_s: float
    startup: Mapping[str, float]
    samples_per_s: float
    step_ms_p50: float
    data_wait_pct: float | None = None

    def __str__(self) -> str:
        rate = f"{self.samples_per_s:,.0f} samples/s, median step {self.step_ms_p50:.2f} ms"
        return f"start {self.startup_s:.2f} s, {rate}"


Arm = Callable[[Path], Timing]
"""Runs the training once, in the empty directory given."""


def ours(
    workload: Workload,
    *,
    strategy: str = "ddp",
    workers: int | None = None,
    address: str = "local",
    tracking: Sequence[str] = ("tracking=none",),
    overrides: Sequence[str] = (),
) -> Arm:
    """Return the arm that runs ``orchestrator.launch``.

    Args:
        workload: The training job.
        strategy: The name of the strategy.
        workers: The number of workers; None for one with ``strategy="single"`` and ``WORKERS`` otherwise.
        address: The address of a running Ray, or ``local`` for an embedded one.
        tracking: Overrides that configure tracking.
        overrides: Further overrides.
    """
    if workers is None:
        workers = 1 if strategy == "single" else WORKERS
    all_overrides = [*basic_overrides(address, strategy=strategy, workers=workers), *tracking, *overrides]

    def run(folder: Path) -> Timing:
        summary = launch(workload, all_overrides, folder).read_record()["summary"]
        return Timing(**{name: summary.get(name) for name in Timing.__dataclass_fields__})

    return run


def basic_overrides(address: str, *, strategy: str = "ddp", workers: int = WORKERS) -> list[str]:
    """Return the overrides that choose the strategy, its number of workers and the Ray to use."""
    return [f"strategy={strategy}", f"strategy.num_workers={workers}", f"cluster.address={address}"]


def launch(workload: Workload, overrides: Sequence[str], folder: Path, *, checkpoint_every: int = 0) -> RunDir:
    """Run ``python -m orchestrator.launch`` in ``folder`` and return its run directory."""
    common = workload_overrides(workload, checkpoint_every=checkpoint_every)
    execute(["-m", "orchestrator.launch", *common, *overrides], folder)
    return run_dir_in(folder)


def workload_overrides(workload: Workload, *, checkpoint_every: int = 0) -> list[str]:
    """Return the overrides that choose the job and its steps."""
    return [
        f"job._target_={workload.job}",
        *(f"job.{name}={value}" for name, value in workload.fields.items()),
        f"train.steps={workload.steps}",
        f"train.global_batch_size={workload.global_batch_size}",
        f"train.log_every={workload.log_every}",
        "train.eval_every=0",
        f"checkpoint.every={checkpoint_every}",
    ]


def stalling_checkpoints(run_dir: RunDir, *, steps: int) -> list[dict[str, Any]]:
    """Return the ``checkpoint_saved`` events of a run of ``steps``, except the last one, for which no step waits."""
    events = (event for event, _ in read_lines(run_dir.events_file))
    return [event for event in events if event["event"] == "checkpoint_saved" and event["step"] < steps]


def run_dir_in(folder: Path) -> RunDir:
    """Return the run directory of the only run launched in ``folder``."""
    (record,) = folder.glob("outputs/*/*/run.json")
    return RunDir(record.parent)


def plain_loop(workload: Workload, *, compile: bool = False, loading_processes: int = 0) -> Arm:
    """Return the arm that trains in a plain loop: on one GPU in bfloat16, or on the CPU if there is none."""
    flags = [f"--loading-processes={loading_processes}", *(["--compile"] if compile else [])]
    return _peer([str(PEERS / "plain_loop.py"), *flags], workload)


def torchrun(
    workload: Workload,
    *,
    script: str = "torchrun_ddp.py",
    workers: int = WORKERS,
    loading_processes: int = 0,
    share_gpu: bool = False,
) -> Arm:
    """Return the arm that runs a plain script of ``peers/`` under torchrun, with NCCL if there are GPUs.

    ``share_gpu``: all ranks use the first GPU.
    """
    command = torchrun_command(script, workers=workers)
    flags = [f"--loading-processes={loading_processes}", *(["--share-gpu"] if share_gpu else [])]
    return _peer([*command, *flags], workload)


def orchestrator_torchrun(
    workload: Workload, *, address: str, script: str = "torchrun_ddp.py", workers: int = WORKERS
) -> Arm:
    """Return the arm that runs a plain script of ``peers/`` under ``orchestrator torchrun``."""
    flags = [f"--nproc-per-node={workers}", f"cluster.address={address}", "tracking=none"]
    return _peer(["-m", "orchestrator.torchrun", *flags, str(PEERS / script)], workload)


def torch_pipeline(workload: Workload, *, split: str, schedule: str, num_microbatches: int) -> Arm:
    """Return the arm that runs two stages of plain ``torch.distributed.pipelining`` under torchrun.

    The second stage begins with the layer ``split``.
    """
    flags = [f"--split={split}", f"--schedule={schedule}", f"--num-microbatches={num_microbatches}"]
    return _peer([*torchrun_command("torch_pipeline.py"), *flags], workload)


def ray_train(workload: Workload, *, address: str = "local", dashboard: bool = True) -> Arm:
    """Return the arm that runs Ray Train's ``TorchTrainer`` with gloo.

    ``dashboard=False`` turns off the dashboard of the Ray that the arm starts itself, with ``address="local"``.
    """
    return _peer(
        [*ray_train_command("ray_train_ddp.py", address), *([] if dashboard else ["--no-dashboard"])], workload
    )


def torchrun_command(script: str, *flags: str, workers: int = WORKERS) -> list[str]:
    """Return the arguments for Python that run a script of ``peers/`` under torchrun; ``flags`` are torchrun's."""
    torchrun_flags = ["--standalone", f"--nproc-per-node={workers}", *flags]
    return ["-m", "torch.distributed.run", *torchrun_flags, str(PEERS / script)]


def ray_train_command(script: str, address: str) -> list[str]:
    """Return the arguments for Python that run a Ray Train script of ``peers/`` on the Ray at ``address``."""
    return [str(PEERS / script), f"--workers={WORKERS}", f"--address={address}"]


def _peer(command: Sequence[str], workload: Workload) -> Arm:
    def run(folder: Path) -> Timing:
        result = folder / "result.json"
        started_at = time.time()
        execute([*command, *peer_arguments(workload, result)], folder)
        measured = json.loads(result.read_text())
        step_ms = measured["step_ms"][min(WARM_UP_STEPS, workload.steps // 5) :]
        return Timing(
            startup_s=measured["first_step_at"] - started_at,
            startup={},
            samples_per_s=workload.global_batch_size * len(step_ms) / sum(step_ms) * 1e3,
            step_ms_p50=statistics.median(step_ms),
        )

    return run


def peer_arguments(workload: Workload, result: Path) -> list[str]:
    """Return the arguments of a script of ``peers/``: the workload, and the file for its measurements."""
    return [
        f"--job={workload.job}",
        f"--fields={json.dumps(dict(workload.fields))}",
        f"--steps={workload.steps}",
        f"--global-batch-size={workload.global_batch_size}",
        f"--log-every={workload.log_every}",
        f"--result={result}",
    ]


class ArmTimeoutError(RuntimeError):
    """An arm did not finish in time."""


def execute(arguments: Sequence[str], folder: Path, *, timeout_s: float = ARM_TIMEOUT_S) -> None:
    """Run Python with ``arguments`` in ``folder`` until it exits.

    Raises:
        ArmTimeoutError: It ran longer than ``timeout_s`` and was killed.
        RuntimeError: It failed.

    Both messages contain the last lines of its output.
    """
    output = folder / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            code: int | None = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            kill_tree(process)
            code = None
    if code == 0:
        return
    command, tail = " ".join(arguments), "\n".join(output.read_text().splitlines()[-30:])
    if code is None:
        raise ArmTimeoutError(f"{command}\ntimed out after {timeout_s:g} s:\n{tail}")
    raise RuntimeError(f"{command}\nexited with {code}:\n{tail}")


@contextmanager
def running_ray(num_cpus: int | None = None) -> Iterator[str]:
    """Run a Ray head of its own, separate from any other on this machine; yields its address.

    Raises:
        RuntimeError: Ray did not start within ``RAY_START_TIMEOUT_S``.
    """
    port = free_port()
    # Ray puts its Unix sockets below this directory, and their paths are limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"]
        flags = ["--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false"]
        flags += [] if num_cpus is None else [f"--num-cpus={num_cpus}"]
        head = subprocess.Popen(
            [*command, *flags],
            env={**environment(), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        watchdog = threading.Timer(RAY_START_TIMEOUT_S, head.kill)
        watchdog.start()
        try:
            assert head.stdout is not None
            if not any("Ray runtime started" in line for line in head.stdout):
                raise RuntimeError("`ray start --head` failed")
            watchdog.cancel()
            yield f"127.0.0.1:{port}"
        finally:
            watchdog.cancel()
            kill_tree(head)


def environment() -> dict[str, str]:
    """Return the environment of every arm."""
    return {**{k: v for k, v in os.environ.items() if k not in UNSET}, **ENVIRONMENT}


def free_port() -> int:
    """Return a TCP port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a process and its descendants. SIGKILL, because a Ray head takes half a minute to shut down on SIGTERM."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for member in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait(timeout=10)
