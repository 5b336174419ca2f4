"""What a driver reports to the process that has started it and would start it again: its run, and the end of that."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.records.run_dir import RunDir

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
    """Return the run that a driver that has ended has reported, None if it had none, and whether that has ended."""
    os.set_blocking(descriptor, False)  # a process that the driver has left may hold the other end
    try:
        lines = os.read(descriptor, _MAX_BYTES).decode().splitlines()
    except BlockingIOError:
        lines = []
    runs = [line.split("\t") for line in lines if line]
    run = ReportedRun(path=Path(runs[-1][0]), location=runs[-1][1]) if runs else None
    return run, lines[-1:] == [""]
