"""What a script reports of its progress, as the points of its rank."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.protocol.messages import TrainPoint
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
            metrics={_name(name): Metric(value, "mean") for name, value in report["metrics"].items()},
        )


def _name(metric: str) -> str:
    return metric if "/" in metric else f"train/{metric}"
