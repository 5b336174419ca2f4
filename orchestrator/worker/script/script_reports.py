"""What a script tells of itself: its progress, as the points of its rank, and why it has failed."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.protocol.messages import Failure, TrainPoint
from orchestrator.protocol.metrics import Metric

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
    """

    def __init__(self) -> None:
        self.rest = b""

    def add(self, chunk: bytes) -> list[bytes]:
        """Add bytes, and return the lines that they complete."""
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        if len(self.rest) > LONGEST_LINE:
            self.rest = self.rest[-LONGEST_LINE:]
        return lines


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

    def point(self, line: bytes) -> TrainPoint | None:
        """Return the point of one report; None if ``line`` is no report."""
        report: Mapping[str, Any] | None = None
        with contextlib.suppress(ValueError):
            report = json.loads(line)
        if not isinstance(report, dict) or "step" not in report:
            return None
        before, self.step = self.step, int(report["step"])
        self.steps = int(report["steps"] or self.steps)
        at, samples, loss = report["time"], report["samples"], report["loss"]
        steps_done = self.step - before
        step_ms: tuple[float, ...] = ()
        if self._reported_at is not None and steps_done > 0:
            step_ms = ((at - self._reported_at) * 1e3 / steps_done,) * steps_done
        self._reported_at = at
        weight = samples or 1.0
        return TrainPoint(
            step=self.step,
            time=at,
            loss_sum=0.0 if loss is None else loss * weight,
            weight=0.0 if loss is None else weight,
            step_ms=step_ms,
            data_wait_ms=0.0,
            comm_share=None,
            samples=samples,
            metrics={
                (name if "/" in name else f"train/{name}"): Metric(value, "mean")
                for name, value in report["metrics"].items()
            },
        )


_TRACEBACK = "Traceback (most recent call last):"
_IGNORED = re.compile(r"Exception ignored [^\n]*\n\Z")
"""What stands before the traceback of an exception that does not end a process."""
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_CONNECTION_LOST = re.compile(
    r"[Cc]onnection (closed|reset) by (remote )?peer|Broken pipe|remote process exited|DistNetworkError"
)


def last_traceback(output: str) -> str:
    """Return the traceback of the exception that has ended a script; empty if its ``output`` has none."""
    begin = len(output)
    while (begin := output.rfind(_TRACEBACK, 0, begin)) >= 0:
        if not _IGNORED.search(output, 0, begin):
            break
    if begin < 0:
        return ""
    lines = output[begin:].splitlines()
    last = next((i for i, line in enumerate(lines[1:], 1) if line and not line.startswith(" ")), len(lines) - 1)
    return "\n".join(lines[: last + 1])


def script_failure(
    exit_code: int, output: str, *, error_file: str, log_tail: str, time: float, after_end: bool
) -> Failure:
    """Describe the end of a script.

    Args:
        exit_code: negative for a signal; not 0.
        output: the end of what it has printed.
        error_file: what torch's ``record`` has written; empty if nothing.
        log_tail: the last lines of the log of its rank.
        time: when it ended, in seconds since the epoch.
        after_end: whether this worker has ended it because of another rank.
    """
    message, traceback = _recorded(error_file)
    traceback = traceback or last_traceback(output)
    message = message or traceback.rpartition("\n")[2] or _without_traceback(exit_code, output)
    if _PORT_TAKEN.search(message):
        message += "; the script opens a port of its own that another program has: let it use MASTER_PORT, or port 0"
    return Failure(
        message=message,
        traceback=traceback,
        time=time,
        collateral=after_end or bool(_CONNECTION_LOST.search(message)),
        log_tail="" if traceback else log_tail,
    )


def _recorded(error_file: str) -> tuple[str, str]:
    """Return the message and the traceback in the file of torch's ``record``; both empty if it has none."""
    try:
        message: Any = json.loads(error_file)["message"]
        if isinstance(message, str):
            return message, ""
        return str(message["message"]), str(message["extraInfo"]["py_callstack"]).rstrip()
    except (ValueError, LookupError, TypeError):
        return "", ""


def _without_traceback(exit_code: int, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = f": {lines[-1]}" if lines else ""
    if exit_code > 0:
        return f"the script ended with exit code {exit_code}{said}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"the script was ended by {name}{said}"
