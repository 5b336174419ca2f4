"""Where the user of this process types, and how commands begin there.

The user of a submitted job may be at another machine than its driver. A launch is then submitted again. A verb that
reads the directory of the runs finds the cluster by its address, or is sent there.

A driver that another process has started, and would start again, reports its run to that.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestrator.compat.ray_job import submission_id
from orchestrator.records.lock import user_name
from orchestrator.records.rank_log import newest_part
from orchestrator.records.run_dir import RunDir

PY_MODULES = "cluster.py_modules="
NO_PY_MODULES = f"{PY_MODULES}[]"
"""The override of a job whose modules are in its environment."""
_VARIABLE = "ORCHESTRATOR_ORIGIN"
LAUNCH = ("python", "-m", "orchestrator.launch")
ADDRESSED_VERBS = ("compare", "doctor", "logs", "queue", "runs", "show", "stop")
"""The verbs with the option ``--address``."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """How commands begin where the user types.

    Attributes:
        launch: the words before the overrides of a launch.
        remote: the words that send a command to the machine of the driver; empty if the user is there.
        address: the URL of the cluster; empty if the user is there, or if it is unknown.
        py_modules: the override of the user in whose place the job has ``NO_PY_MODULES``; empty without one.
        user: the user and their host, for messages; empty if unknown.
    """

    launch: Sequence[str] = LAUNCH
    remote: Sequence[str] = ()
    address: str = ""
    py_modules: str = ""
    user: str = ""

    def relaunch(self, overrides: Sequence[str]) -> list[str]:
        """Return the words of a launch with the ``overrides`` of the job."""
        return [*self.launch, *filter(None, (self.py_modules if w == NO_PY_MODULES else w for w in overrides))]

    def verb(self, name: str, *arguments: str) -> str:
        """Return the command line of the verb ``name`` for the runs on the machine of the driver."""
        if self.address and name in ADDRESSED_VERBS:
            return shlex.join(["orchestrator", name, *arguments, "--address", self.address])
        command = [*self.remote, "python", "-m", f"orchestrator.{name}"] if self.remote else ["orchestrator", name]
        return shlex.join([*command, *arguments])

    def log(self, run_dir: RunDir, rank: int) -> str:
        """Return the file with the log of a rank, or the command that shows it if the user may have no such file."""
        if run_dir.url is None and not self.remote:
            return str(newest_part(run_dir.log_file(rank)))
        return self.verb("logs", run_dir.location, "--rank", str(rank))

    def variables(self) -> Mapping[str, str]:
        """Return the environment variable that carries the origin to a submitted job."""
        return {_VARIABLE: json.dumps(asdict(self))}


HERE = Origin()
"""The machine of the driver."""


def origin_of_submission(
    overrides: Sequence[str],
    *,
    given_address: str | None,
    address: str,
    working_dir: str,
    restarts: int | None,
    ray: Sequence[str],
) -> Origin:
    """Return the origin of a job of ``orchestrator submit``.

    Args:
        overrides: the overrides of the launch.
        given_address, working_dir, restarts: the values of the options, as typed; None without them.
        address: the URL of the cluster.
        ray: the words before a command of Ray.
    """
    to = [] if given_address is None else ["--address", given_address]
    directory = ["--working-dir", working_dir]
    options = [*to, *([] if working_dir == "." else directory)]
    options += [] if restarts is None else ["--restarts", str(restarts)]
    return Origin(
        launch=["orchestrator", "submit", *options],
        remote=[*ray, "job", "submit", *to, *directory, "--"],
        address=address,
        py_modules=next((word for word in reversed(overrides) if word.startswith(PY_MODULES)), ""),
        user=who_asks(),
    )


def who_asks() -> str:
    """Return who has typed the command of this process, and where: ``ada on laptop``."""
    return this_origin().user or f"{user_name()} on {socket.gethostname()}"


def this_origin() -> Origin:
    """Return the origin of this process: without a submitted job, its own machine."""
    if submission_id() is None:
        return HERE
    if (carried := os.environ.get(_VARIABLE)) is not None:
        return Origin(**json.loads(carried))
    token = ("RAY_AUTH_MODE=token",) if os.environ.get("RAY_AUTH_MODE") == "token" else ()
    remote = (*token, "ray", "job", "submit", "--working-dir", ".", "--")
    return Origin(launch=(*remote, *LAUNCH), remote=remote)


LEFT_RUN = "ORCHESTRATOR_LEFT_RUN"
"""The environment variable that tells a driver which run the one before it has left: a directory or a URL.

The value begins with the id of the process that has set it, because what the driver starts inherits the variable.
"""
_DESCRIPTOR = "ORCHESTRATOR_REPORTS_FD"
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """The run of a driver; ``location`` is where the user finds the directory ``path``."""

    path: Path
    location: str

    @property
    def final_state(self) -> str | None:
        """The state of the run if it had ended before its driver died, None otherwise."""
        try:
            state = RunDir(self.path).read_record().get("state")
        except ValueError:
            return None
        # The state that a dead driver has left becomes "killed".
        return state if state in ("finished", "pruned", "failed") else None

    @property
    def may_have_checkpoint(self) -> bool:
        """Whether a checkpoint is in the directory, or may be on the store."""
        return self.location != str(self.path) or any(RunDir(self.path).checkpoints.glob("step-*"))


def report_run(run_dir: RunDir) -> None:
    """Report the run of this driver, if the process that has started it asks for reports."""
    _report(f"{run_dir.path}\t{run_dir.location}\n")


def report_end() -> None:
    """Report that the run of this driver has ended, with a verdict or an error that is shown."""
    _report("\n")


def _report(text: str) -> None:
    if (descriptor := _given(_DESCRIPTOR)) is not None:
        with contextlib.suppress(OSError):  # the other process has died
            os.write(int(descriptor), text.encode())


def left_run() -> str | None:
    """Return the directory or URL of the run that the driver before this one has left; None if there was none."""
    return _given(LEFT_RUN)


def _given(name: str) -> str | None:
    """Return what the parent of this process has set for it; None if nobody, or another process for another one."""
    parent, _, value = os.environ.get(name, "").partition(":")
    return value if parent == str(os.getppid()) else None


def variables(descriptor: int, left: ReportedRun | None) -> Mapping[str, str]:
    """Return the environment variables of a driver that reports to ``descriptor``, and continues the run ``left``."""
    values = {_DESCRIPTOR: str(descriptor), **({} if left is None else {LEFT_RUN: left.location})}
    return {name: f"{os.getpid()}:{value}" for name, value in values.items()}


def read_reports(descriptor: int) -> tuple[ReportedRun | None, bool]:
    """Return the run of a driver that has ended, None if it had none, and whether the run has ended."""
    os.set_blocking(descriptor, False)  # a process that the driver has left may hold the other end
    try:
        lines = os.read(descriptor, _MAX_BYTES).decode().splitlines()
    except BlockingIOError:
        lines = []
    runs = [line.split("\t") for line in lines if line]
    run = ReportedRun(path=Path(runs[-1][0]), location=runs[-1][1]) if runs else None
    return run, lines[-1:] == [""]
