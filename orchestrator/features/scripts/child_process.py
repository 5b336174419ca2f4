"""The process of a script: its environment variables, its start and end, and what it tells of itself.

The variables are those of torchrun and of its run. What it tells is its progress, as the points of its rank.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from orchestrator.features.scripts.at_start import sitecustomize
from orchestrator.protocol.messages import Assignment, TrainPoint
from orchestrator.protocol.metrics import Metric
from orchestrator.records.lock import end_with_parent
from orchestrator.script_api import CHECKPOINTS_VARIABLE, MOST_STEPS, REPORT_VARIABLE, send
from orchestrator.worker.process.family import adopt_orphans, end_family
from orchestrator.worker.process.network import flight_variables

IDLE_SHARE = 0.02
"""A script that uses a smaller share of a CPU, with its children, does nothing."""


class ScriptProcess:
    """A program in a process group of its own, which ends with the thread that has started it.

    Attributes:
        output: the descriptor from which its stdout and stderr are read.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self._mark = f"{REPORT_VARIABLE}={environment[REPORT_VARIABLE]}"
        adopt_orphans()
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGKILL),
        )
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()
        self._cpu_s = 0.0
        self._seen: set[psutil.Process] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None as long as the script runs."""
        return self._process.poll()

    def wait(self) -> None:
        """Wait for its end."""
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the script and the processes that it has started."""
        self._look()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def abort(self) -> None:
        """Send SIGABRT to the script alone, at which a Python process with a fault handler writes its stacks."""
        if self.exit_code() is None:
            self._process.send_signal(signal.SIGABRT)

    def close(self, *, done: bool) -> None:
        """Kill the script with all processes that it has started, unless it is ``done``: they may go on then."""
        if not done:
            known = {process.pid for process in self._seen if process.is_running()}
            end_family(self._mark, self._process.pid, known)
            self.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def has_worked(self, seconds: float) -> bool:
        """Return whether it has computed in the ``seconds`` since the last call, with its children."""
        used_s = 0.0
        for process in self._look():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                used_s += times.user + times.system
        worked_s, self._cpu_s = used_s - self._cpu_s, used_s
        return worked_s > IDLE_SHARE * seconds

    def open_files(self, mark: str) -> list[Path]:
        """Return the files with ``mark`` in their name that it, or a process that it has started, has open."""
        found: list[Path] = []
        for process in self._look():
            with contextlib.suppress(OSError):  # it has ended, or runs as another user
                found += [link.readlink() for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        return sorted({path for path in found if mark in path.name and path.is_file()})

    def _look(self) -> Sequence[psutil.Process]:
        """Return the script and its descendants, which it may leave behind under another parent."""
        found: Sequence[psutil.Process] = ()
        with contextlib.suppress(psutil.Error):
            script = psutil.Process(self._process.pid)
            found = (script, *script.children(recursive=True))
        self._seen = {*(process for process in self._seen if process.is_running()), *found}
        return found


VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def installed_packages(paths: Iterable[str]) -> list[str]:
    """Return the directories in ``sys.path`` with packages that only this worker has installed, for ``cluster.pip``."""
    own = (Path(sys.prefix), Path(sys.base_prefix))
    return [p for p in paths if Path(p).name == "site-packages" and not any(Path(p).is_relative_to(o) for o in own)]


def script_environment(
    own: Mapping[str, str],
    assignment: Assignment,
    *,
    packages: Sequence[str] = (),
    reports: Path,
    errors: Path,
    checkpoints: Path,
    record: Path | None,
) -> dict[str, str]:
    """Return the environment of the script of one rank.

    Args:
        own: the environment of the worker.
        assignment: the generation, and the rank in it.
        packages: the directories of :func:`installed_packages`.
        reports: the socket for the reports of the script.
        errors: where a function that torch's ``record`` decorates writes its error.
        checkpoints: the directory that restarts find again.
        record: the socket on which a script in Python tells what it has enqueued; None for any other program.
    """
    places, rank = assignment.places, assignment.global_rank
    node = places[rank].node
    local = [r for r, place in enumerate(places) if place.node == node]
    world_size, num_nodes = str(len(places)), str(len({place.node for place in places}))
    recovery = assignment.config.recovery
    values = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local.index(rank)),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(len(local)),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": num_nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": assignment.store_host,
        "MASTER_PORT": str(assignment.store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store of the generation, so that no port has to be found free
        "TORCHELASTIC_RUN_ID": assignment.run_uid,
        "TORCHELASTIC_RESTART_COUNT": str(assignment.failures),
        "TORCHELASTIC_MAX_RESTARTS": str(recovery.max_failures),
        "TORCHELASTIC_ERROR_FILE": str(errors),
        REPORT_VARIABLE: str(reports),
        CHECKPOINTS_VARIABLE: str(checkpoints),
    }
    if "OMP_NUM_THREADS" not in assignment.config.cluster.env:
        values["OMP_NUM_THREADS"] = str(assignment.plan.threads_per_worker)
    paths = list(packages)
    if record is not None:
        values[sitecustomize.RECORD_VARIABLE] = str(record)
        paths.insert(0, str(Path(sitecustomize.__file__).parent))  # which has to be the first
    if paths:
        values["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [own.get("PYTHONPATH")])])
    tracking = assignment.config.tracking
    if rank == 0 and assignment.tracked_as is not None and tracking.uri is not None:
        values |= {
            "MLFLOW_TRACKING_URI": tracking.uri,
            "MLFLOW_EXPERIMENT_NAME": tracking.experiment,
            "MLFLOW_RUN_ID": assignment.tracked_as,
        }
    gpus = [places[r].gpu for r in local]
    if None not in gpus:
        values[VISIBLE_GPUS] = ",".join(map(str, gpus))  # torchrun's scripts choose theirs by LOCAL_RANK
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return {**defaults, **flight_variables(own), **own, **values}


LONGEST_LINE = 1 << 16


class ReportSocket:
    """The socket to which the processes of a script send their reports. Use as a context manager.

    Attributes:
        path: where it is. Short, because the kernel takes about 100 characters.
        listener: readable when a process wants to connect.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="orchestrator-"))
        self.path = self._folder / "reports"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.path))
        self.listener.listen()

    @property
    def errors(self) -> Path:
        """A file for the error of the script."""
        return self._folder / "error.json"

    @property
    def record(self) -> Path:
        """A socket of the script, see :func:`ask`."""
        return self._folder / "record"

    @property
    def uncaught(self) -> Path:
        """A file for the exception that ends the script, which ``at_start/sitecustomize.py`` writes."""
        return self._folder / sitecustomize.UNCAUGHT

    def end_reports(self) -> None:
        """Send an empty line after the last report of a script that has run in this process."""
        send(str(self.path), b"\n")

    def event_files(self) -> list[Path]:
        """Return the event files that the script has opened, as ``at_start/sitecustomize.py`` tells."""
        try:
            text = (self._folder / sitecustomize.EVENT_FILES).read_text(errors="surrogateescape")
        except FileNotFoundError:
            return []
        return [Path(line) for line in text.splitlines()]

    def __enter__(self) -> ReportSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def ask(path: Path, *, timeout_s: float) -> str | None:
    """Return what a script sends to those who connect to its socket ``path``; None if nothing comes in time."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        with connection.makefile() as answer:
            return answer.read() or None
    return None


class Lines:
    """Cuts a stream of bytes into lines.

    Attributes:
        rest: the last line, which is not complete. Of a long one, as of a progress bar, only the end is kept.

    Args:
        longest: how much of it, in bytes.
    """

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self.rest = b""
        self._longest = longest

    def add(self, chunk: bytes) -> list[bytes]:
        """Add bytes, and return the lines that they complete."""
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        if len(self.rest) > self._longest:
            self.rest = self.rest[-self._longest :]
        return lines


MOST_STEP_TIMES = 100
"""The times of steps in a point, however many steps it is of: a step of a script may be a token."""


class Reports:
    """Turns the reports of one rank into points.

    Attributes:
        step: the last step that was reported; 0 if none was.
        steps: the number of steps of the run, as far as it is known; 0 if it is not.
    """

    def __init__(self) -> None:
        self.step = 0
        self.steps = 0
        self._reported_at: float | None = None

    def note_step(self, step: int) -> None:
        """Take ``step``, of an event file, as the progress of a script that has not reported any itself."""
        if self._reported_at is None:
            self.step = max(self.step, step)

    def point(self, line: bytes) -> TrainPoint | None:
        """Return the point of one report; None if ``line`` is no report: any process can write to the socket."""
        try:
            return self._point(json.loads(line))
        except (ValueError, TypeError, LookupError, OverflowError, AttributeError, RecursionError):
            return None

    def _point(self, report: Mapping[str, Any]) -> TrainPoint:
        step, steps = int(report["step"]), int(report["steps"] or self.steps)
        at, samples = float(report["time"]), float(report["samples"])
        loss = None if report["loss"] is None else float(report["loss"])
        metrics = {name: Metric(float(value), "mean") for name, value in report["metrics"].items()}
        if not (0 <= step <= MOST_STEPS and 0 <= steps <= MOST_STEPS and math.isfinite(at) and 0 <= samples < math.inf):
            raise ValueError(report)
        num_steps = step - self.step
        step_ms: tuple[float, ...] = ()
        if self._reported_at is not None and num_steps > 0 and at > self._reported_at:
            step_ms = ((at - self._reported_at) * 1e3 / num_steps,) * min(num_steps, MOST_STEP_TIMES)
        self.step, self.steps, self._reported_at = step, steps, at
        weight = samples or 1.0
        return TrainPoint(
            step=step,
            time=at,
            loss_sum=0.0 if loss is None else loss * weight,
            weight=0.0 if loss is None else weight,
            step_ms=step_ms,
            num_steps=num_steps,
            data_wait_ms=0.0,
            comm_share=None,
            samples=samples,
            metrics={name if "/" in name else f"train/{name}": metric for name, metric in metrics.items()},
        )
