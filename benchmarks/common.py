"""What every benchmark shares: the arms, how they are run and timed, ratios, tables, the machine's ceiling.

An arm is one way to do the same work, as a command line of its own. A benchmark runs its arms in turn, round after
round, and compares them within a round: what the machine does besides hits neighbours alike.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
ARM_TIMEOUT_S = 240
WARM_UP_STEPS = 10
"""Left out by every arm; ours leaves out as many."""
QUIET_PCT = 20.0
QUIET_TIMEOUT_S = 20.0
"""Before an arm, the longest wait until the machine does little else: what the arm before left, other people's work."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_worker_niceness": "0",  # Ray's default of 15 would handicap its workers against torchrun's
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
"""The same for every arm. Compiled modules may be kept, as on any machine in use."""

DROPPED = ("PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS", "PYTHONPATH")


@dataclass(frozen=True, kw_only=True)
class Work:
    """One training job, the same for every arm. ``fields`` are those of the job's dataclass."""

    job: str
    steps: int
    global_batch_size: int
    fields: Mapping[str, Any]
    log_every: int


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What a run took: wall-clock start-up, and rank 0's steps after warm-up.

    ``parts``: seconds of the start-up by name, where the arm tells them.
    """

    startup_s: float
    samples_per_s: float
    step_ms_p50: float
    parts: Mapping[str, float]


Arm = Callable[[Path], Timing]
"""Runs once, in the empty directory given."""


def ours(work: Work, *overrides: str, workers: int = 2, environment: Mapping[str, str] | None = None) -> Arm:
    """``python -m orchestrator.launch``; overrides such as ``strategy=single`` come last."""

    def run(folder: Path) -> Timing:
        arguments = [
            *([] if any(o.startswith("strategy=") for o in overrides) else ["strategy=ddp"]),
            f"strategy.num_workers={workers}",
            f"job._target_={work.job}",
            *(f"job.{name}={value}" for name, value in work.fields.items()),
            f"train.steps={work.steps}",
            f"train.global_batch_size={work.global_batch_size}",
            f"train.log_every={work.log_every}",
            "train.eval_every=0",
            "checkpoint.every=0",
            *([] if any(o.startswith("tracking") for o in overrides) else ["tracking=none"]),
            *overrides,
        ]
        execute([sys.executable, "-m", "orchestrator.launch", *arguments], folder, environment)
        (record,) = folder.glob("outputs/*/*/run.json")
        summary = json.loads(record.read_text())["summary"]
        return Timing(
            startup_s=summary["startup_s"],
            samples_per_s=summary["samples_per_s"],
            step_ms_p50=summary["step_ms_p50"],
            parts=summary["startup"],
        )

    return run


def torchrun(work: Work, *, workers: int = 2) -> Arm:
    """Plain ``DistributedDataParallel`` under torchrun: ``peers/torchrun_ddp.py``."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    return _peer([*launcher, str(HERE / "peers" / "torchrun_ddp.py")], work)


def ray_train(
    work: Work, *, workers: int = 2, dashboard: bool = True, environment: Mapping[str, str] | None = None
) -> Arm:
    """Ray Train's ``TorchTrainer`` with gloo: ``peers/ray_train_ddp.py``."""
    flags = [f"--workers={workers}", *([] if dashboard else ["--no-dashboard"])]
    return _peer([str(HERE / "peers" / "ray_train_ddp.py"), *flags], work, environment)


def _peer(command: Sequence[str], work: Work, environment: Mapping[str, str] | None = None) -> Arm:
    def run(folder: Path) -> Timing:
        result = folder / "result.json"
        arguments = [
            f"--job={work.job}",
            f"--fields={json.dumps(dict(work.fields))}",
            f"--steps={work.steps}",
            f"--global-batch-size={work.global_batch_size}",
            f"--log-every={work.log_every}",
            f"--result={result}",
        ]
        created = execute([sys.executable, *command, *arguments], folder, environment)
        data = json.loads(result.read_text())
        step_ms = data["step_ms"][WARM_UP_STEPS:]
        return Timing(
            startup_s=data["first_step_at"] - created,
            samples_per_s=work.global_batch_size * len(step_ms) / sum(step_ms) * 1e3,
            step_ms_p50=statistics.median(step_ms),
            parts={},
        )

    return run


def execute(command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> float:
    """Run to the end; returns the wall-clock time at which the process was created.

    Raises:
        RuntimeError: it failed or took longer than ``ARM_TIMEOUT_S``; its last output is in the text.
    """
    created = time.time()
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=child_environment(environment),
        )
        try:
            code = process.wait(timeout=ARM_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            end_tree(process.pid)
            code = None
        if code != 0:
            output.seek(0)
            tail = "\n".join(output.read().splitlines()[-30:])
            raise RuntimeError(f"{' '.join(command)}\nended with {code}:\n{tail}")
    return created


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in DROPPED}
    return {**kept, **ENVIRONMENT, "PYTHONPATH": str(REPOSITORY), **(extra or {})}


def end_tree(pid: int) -> None:
    """Kill a process and all that it started. Asked nicely, a Ray head drains for half a minute."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)


@contextmanager
def running_ray(*, num_cpus: int = 4) -> Iterator[str]:
    """A head node that runs already, beside any other Ray of this machine; yields its address."""
    port = free_port()
    with tempfile.TemporaryDirectory(
        prefix="ray-", ignore_cleanup_errors=True
    ) as temporary:  # short: Ray's socket paths may not exceed 107 bytes
        ray = Path(sys.executable).with_name("ray")
        flags = [f"--port={port}", f"--num-cpus={num_cpus}", f"--temp-dir={temporary}", "--include-dashboard=false"]
        head = subprocess.Popen(
            [str(ray), "start", "--head", "--block", "--disable-usage-stats", *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            env=child_environment(),
        )
        try:
            address = f"{_own_ip()}:{port}"
            _wait_for(address, head)
            yield address
        finally:
            end_tree(head.pid)
            head.wait(timeout=10)


def _wait_for(address: str, head: subprocess.Popen[bytes]) -> None:
    script = (
        "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); assert ray.cluster_resources().get('CPU')"
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and head.poll() is None:
        probe = subprocess.run(
            [sys.executable, "-c", script, address], capture_output=True, env=child_environment(), timeout=60
        )
        if probe.returncode == 0:
            return
        time.sleep(1)
    raise RuntimeError(f"no Ray came up at {address}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _own_ip() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the system chooses the interface
        return str(probe.getsockname()[0])


def interleave(arms: Mapping[str, Arm], *, rounds: int, first: int = 0) -> list[dict[str, Timing]]:
    """Run every arm once a round, in odd rounds in reverse order; ``first`` is the number of the first round."""
    results = []
    for number in range(first, first + rounds):
        names = list(arms) if number % 2 == 0 else list(reversed(arms))
        timings: dict[str, Timing] = {}
        for name in names:
            wait_for_quiet()
            with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
                timings[name] = arms[name](Path(folder))
            t = timings[name]
            said = f"start {t.startup_s:.2f} s, {t.samples_per_s:,.0f} samples/s, step p50 {t.step_ms_p50:.2f} ms"
            print(f"  round {number + 1}  {name}: {said}", flush=True)
        results.append(timings)
    return results


def wait_for_quiet() -> None:
    """Wait until the machine is nearly idle, for ``QUIET_TIMEOUT_S`` at most."""
    deadline = time.monotonic() + QUIET_TIMEOUT_S
    while psutil.cpu_percent(interval=1.0) > QUIET_PCT and time.monotonic() < deadline:
        pass


def ratios(rounds: Sequence[Mapping[str, Timing]], over: str, under: str, field: str) -> list[float]:
    """``over`` divided by ``under`` in each round."""
    return [getattr(r[over], field) / getattr(r[under], field) for r in rounds]


def median_of(rounds: Sequence[Mapping[str, Timing]], arm: str, field: str) -> float:
    return statistics.median(getattr(r[arm], field) for r in rounds)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A ratio per round, its goal, and what its median says. ``at_least``: else at most."""

    name: str
    values: Sequence[float]
    goal: float
    at_least: bool = True

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool:
        return self.median >= self.goal if self.at_least else self.median <= self.goal


def claims_table(claims: Sequence[Claim]) -> str:
    """Markdown: one line a claim, its median, its rounds, its goal."""
    rows = [
        [
            c.name,
            f"{c.median:.3f}",
            " ".join(f"{v:.3f}" for v in c.values),
            f"{'>=' if c.at_least else '<='} {c.goal:g}",
            "yes" if c.met else "NO",
        ]
        for c in claims
    ]
    return table(["ratio", "median", "each round", "goal", "met"], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def report(name: str, *, claims: Sequence[Claim], ceiling: float, notes: str = "", details: Any = None) -> None:
    """Print the result, and write it to ``results/<name>.md`` and ``.json``."""
    versions = ", ".join(f"{p} {_version(p)}" for p in ("torch", "ray"))
    cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    where = (
        f"{datetime.now():%Y-%m-%d}, {cores} cores ({platform.machine()}), Python {python}, {versions}; ceiling "
        f"C = {ceiling:.2f}. The machine is shared and noisy: only ratios within a round mean something."
    )
    text = "\n\n".join(t for t in (f"# {name}", where, claims_table(claims), notes) if t) + "\n"
    print("\n" + text)
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / f"{name}.md").write_text(text)
    data = {
        "ceiling": ceiling,
        "claims": [
            {"name": c.name, "values": list(c.values), "median": c.median, "goal": c.goal, "met": c.met} for c in claims
        ],
        "details": details,
    }
    (results / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")


def _version(package: str) -> str:
    import importlib.metadata

    return importlib.metadata.version(package)


def ceiling(*, seconds: float = 2.0, rounds: int = 3) -> float:
    """C: what two pinned one-thread copies of a training step do together, over what one does alone."""
    values = []
    cores = sorted(os.sched_getaffinity(0))[:2]
    for _ in range(rounds):
        alone = _pinned(cores[:1], seconds)[0]
        values.append(sum(_pinned(cores, seconds)) / alone)
    return statistics.median(values)


def _pinned(cores: Sequence[int], seconds: float) -> list[float]:
    command = [sys.executable, str(HERE / "ceiling.py"), str(seconds)]
    # All copies start to work at the same time, when each has imported what it needs.
    processes = [
        subprocess.Popen([*command, str(c)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment())
        for c in cores
    ]
    for p in processes:
        assert p.stdout is not None
        p.stdout.readline()
    for p in processes:
        assert p.stdin is not None
        p.stdin.write(b"go\n")
        p.stdin.flush()
    return [float(p.communicate(timeout=60)[0]) for p in processes]
