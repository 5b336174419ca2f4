"""What a script of the user may tell the run that has started it, and ask of it. Imports only the standard library.

The workers of ``strategy=script`` set the environment variables that this module reads. Without them, as under plain
``python`` or ``torchrun``, :func:`report` does nothing.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

REPORT_VARIABLE = "ORCHESTRATOR_REPORT"
"""The path of the socket that takes reports: a line of JSON each."""
CHECKPOINTS_VARIABLE = "ORCHESTRATOR_CHECKPOINT_DIR"

LARGEST_REPORT_BYTES = 1 << 22
MOST_STEPS = 2**63 - 1
"""What MLflow can store."""

_connection: socket.socket | None = None
_connected_to = ""
_steps = 0
_lock = threading.RLock()


def report(
    *,
    step: int | None = None,
    steps: int | None = None,
    loss: Any = None,
    samples: float = 0,
    **metrics: Any,
) -> None:
    """Report progress to the run, which shows it as that of any other run: loss, throughput, progress and time left.

    Each rank may call it, or rank 0 alone, from any thread or process. Samples of the ranks are added, and losses
    weighted by them. Values may be numbers or tensors of one element; reading one from a GPU waits for it. Does nothing
    outside of a run.

    Args:
        step: the step that is done, from 1; None for one more than in the last call. It may count samples or tokens.
        steps: the number of steps of the whole run, for the progress and the time left; None if it is unknown.
        loss: the mean loss of ``samples``; None if there is none.
        samples: the number of samples that this rank has trained on since its last report.
        metrics: further values to log, averaged over the ranks that report them: ``accuracy=0.9`` is logged as
            ``train/accuracy``, and ``**{"val/accuracy": 0.9}`` under its own name. None is left out.

    Raises:
        TypeError: an argument is no number.
        ValueError: an argument is out of range, or all of them together are too large.
    """
    global _steps
    if (path := os.environ.get(REPORT_VARIABLE)) is None:
        return
    given = None if step is None else _whole("step", step)
    message = {
        "time": time.time(),
        "steps": None if steps is None else _whole("steps", steps),
        "loss": None if loss is None else _number("loss", loss),
        "samples": _amount("samples", samples),
        "metrics": {name: _number(name, value) for name, value in metrics.items() if value is not None},
    }
    with _lock:
        _steps = _steps + 1 if given is None else given
        line = json.dumps({**message, "step": _steps}).encode() + b"\n"
        if len(line) > LARGEST_REPORT_BYTES:
            raise ValueError(
                f"orchestrator.report: {len(metrics):,} metrics are {len(line):,} bytes; a report has at most "
                f"{LARGEST_REPORT_BYTES:,}, so divide it, each part with the same step"
            )
        send(path, line)


def _plain(value: Any) -> Any:
    """Return the number in a tensor or an array of one element, and anything else as it is."""
    item = getattr(value, "item", None)
    return item() if callable(item) else value


def _number(name: str, value: Any) -> float:
    try:
        plain = _plain(value)
        if not isinstance(plain, str | bytes):
            return float(plain)
    except OverflowError:
        raise ValueError(_text(name, value, "too large for a float")) from None
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(_text(name, value, "expected a number, or a tensor of one element"))


def _amount(name: str, value: Any) -> float:
    number = _number(name, value)
    if isinstance(value, bool) or not 0 <= number < float("inf"):
        raise ValueError(_text(name, value, "expected a number that is finite and not negative"))
    return number


def _whole(name: str, value: Any) -> int:
    number = _number(name, value)
    plain = _plain(value)
    if isinstance(plain, bool) or not 0 <= number <= MOST_STEPS or number != int(number):
        raise ValueError(_text(name, value, f"expected a whole number from 0 to {MOST_STEPS:,}"))
    return int(plain)


def _text(name: str, value: Any, expected: str) -> str:
    shown = repr(value)
    return f"orchestrator.report: {name}={shown if len(shown) <= 60 else shown[:57] + '...'}: {expected}"


def checkpoint_dir() -> Path:
    """Return a directory for the checkpoints of the script, which restarts of the run find as it was.

    It is the same on all ranks of a run. Outside of a run, it is ``checkpoints`` in the working directory.
    """
    path = Path(os.environ.get(CHECKPOINTS_VARIABLE, "checkpoints"))
    path.mkdir(parents=True, exist_ok=True)
    return path


def send(path: str, line: bytes) -> None:
    """Send a line to the worker; a worker that has gone is no error, because it ends this process itself.

    A signal handler that reports may have interrupted a line of its own thread: it has a connection of its own.
    """
    global _connection, _connected_to
    connection, _connection = _connection, None
    try:
        if connection is None or _connected_to != path:  # a process may run one script after another
            _connected_to = path
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(path)
        connection.sendall(line)
    except OSError:
        os.environ.pop(REPORT_VARIABLE, None)
    else:
        _connection = connection


def _begin_in_child() -> None:
    """Let a forked process have a connection and a lock of its own."""
    global _connection, _lock
    _connection, _lock = None, threading.RLock()


os.register_at_fork(after_in_child=_begin_in_child)
