"""The arms of a benchmark: ways to do the same training, each a command line of its own, and what it took."""

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

HERE = Path(__file__).resolve().parent
WORKERS = 2
WARM_UP_STEPS = 10
"""Left out by every arm, or a fifth of a short run; ours leaves out as many."""
ARM_TIMEOUT_S = 240
RAY_START_TIMEOUT_S = 60

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{HERE.parent}:{HERE / 'peers'}",
    "RAY_worker_niceness": "0",  # Ray's default of 15 would handicap its workers against torchrun's
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
"""The same for every arm."""

DROPPED = ("PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS")
"""Compiled modules may be kept, as on any machine in use."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One training job, the same for every arm. ``fields`` are those of the job's dataclass."""

    job: str
    fields: Mapping[str, Any]
    steps: int
    global_batch_size: int
    log_every: int


@dataclass(frozen=True, kw_only=True)
class Timing:
    """``startup_s``: process start to the end of the first step; ``startup``: its parts, where the arm tells them.

    The others are of rank 0's steps after warm-up.
    """

    startup_s: float
    startup: Mapping[str, float]
    samples_per_s: float
    step_ms_p50: float


Arm = Callable[[Path], Timing]
"""Runs once, in the empty directory given."""


def ours(
    work: Work,
    *,
    strategy: str = "ddp",
    address: str = "local",
    tracking: Sequence[str] = ("tracking=none",),
    settings: Sequence[str] = (),
) -> Arm:
    """Our command on the Ray at ``address``, or (``local``) on one of its own; ``settings``: more words of it."""

    def run(folder: Path) -> Timing:
        workers = 1 if strategy == "single" else WORKERS
        words = [f"strategy={strategy}", f"strategy.num_workers={workers}", f"cluster.address={address}"]
        record = launch(work, [*words, *tracking, *settings], folder) / "run.json"
        summary = json.loads(record.read_text())["summary"]
        return Timing(**{name: summary[name] for name in Timing.__dataclass_fields__})

    return run


def launch(work: Work, words: Sequence[str], folder: Path, *, checkpoint_every: int = 0) -> Path:
    """``python -m orchestrator.launch`` with these words for the work; the run directory that it leaves."""
    common = [
        f"job._target_={work.job}",
        *(f"job.{name}={value}" for name, value in work.fields.items()),
        f"train.steps={work.steps}",
        f"train.global_batch_size={work.global_batch_size}",
        f"train.log_every={work.log_every}",
        "train.eval_every=0",
        f"checkpoint.every={checkpoint_every}",
    ]
    execute(["-m", "orchestrator.launch", *common, *words], folder)
    (record,) = folder.glob("outputs/*/*/run.json")
    return record.parent


def torchrun(work: Work) -> Arm:
    """Plain ``DistributedDataParallel`` under torchrun."""
    return _peer(_torchrun("torchrun_ddp.py"), work)


def torch_pipeline(work: Work, *, split: str, schedule: str, num_microbatches: int) -> Arm:
    """Two stages of plain ``torch.distributed.pipelining`` under torchrun; the second begins with layer ``split``."""
    flags = [f"--split={split}", f"--schedule={schedule}", f"--num-microbatches={num_microbatches}"]
    return _peer([*_torchrun("torch_pipeline.py"), *flags], work)


def ray_train(work: Work, *, address: str = "local", dashboard: bool = True) -> Arm:
    """Ray Train's ``TorchTrainer`` with gloo; without a dashboard as far as it starts a Ray of its own."""
    flags = [f"--workers={WORKERS}", f"--address={address}", *([] if dashboard else ["--no-dashboard"])]
    return _peer([str(HERE / "peers" / "ray_train_ddp.py"), *flags], work)


def python_of_torchrun(*flags: str) -> list[str]:
    """What to give Python, without the script."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}", *flags]


def _torchrun(script: str) -> list[str]:
    return [*python_of_torchrun(), str(HERE / "peers" / script)]


def _peer(command: Sequence[str], work: Work) -> Arm:
    def run(folder: Path) -> Timing:
        result = folder / "result.json"
        created = time.time()
        execute([*command, *words_of(work, result)], folder)
        measured = json.loads(result.read_text())
        step_ms = measured["step_ms"][min(WARM_UP_STEPS, work.steps // 5) :]
        return Timing(
            startup_s=measured["first_step_at"] - created,
            startup={},
            samples_per_s=work.global_batch_size * len(step_ms) / sum(step_ms) * 1e3,
            step_ms_p50=statistics.median(step_ms),
        )

    return run


def words_of(work: Work, result: Path) -> list[str]:
    """What a script of ``peers/`` is told: the work, and where to write what it measured."""
    return [
        f"--job={work.job}",
        f"--fields={json.dumps(dict(work.fields))}",
        f"--steps={work.steps}",
        f"--global-batch-size={work.global_batch_size}",
        f"--log-every={work.log_every}",
        f"--result={result}",
    ]


class Stuck(RuntimeError):
    """An arm does not come to its end."""


def execute(words: Sequence[str], folder: Path, *, timeout_s: float = ARM_TIMEOUT_S) -> None:
    """Python with these words, to its end.

    Raises:
        Stuck: it takes longer than ``timeout_s``; its last output is in the text.
        RuntimeError: it failed; the same.
    """
    output = folder / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            code: int | None = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            end_tree(process)
            code = None
    if code != 0:
        tail = "\n".join(output.read_text().splitlines()[-30:])
        raise (Stuck if code is None else RuntimeError)(f"{' '.join(words)}\nended with {code}:\n{tail}")


@contextmanager
def running_ray(num_cpus: int | None = None) -> Iterator[str]:
    """A Ray of ``ray start --head``, beside any other of this machine; yields its address."""
    port = free_port()
    # Ray's sockets lie below this directory, and their paths may have 107 bytes.
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
        overdue = threading.Timer(RAY_START_TIMEOUT_S, head.kill)
        overdue.start()
        try:
            assert head.stdout is not None
            if not any("Ray runtime started" in line for line in head.stdout):
                raise RuntimeError("`ray start --head` did not come up")
            overdue.cancel()
            yield f"127.0.0.1:{port}"
        finally:
            overdue.cancel()
            end_tree(head)


def environment() -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k not in DROPPED}, **ENVIRONMENT}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all that it started. Asked nicely, a Ray head drains for half a minute."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for member in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait(timeout=10)
