"""What a script of the user may tell the run that has started it, and ask of it. Imports only the standard library.

The workers of ``strategy=script`` set the environment variables that this module reads. Without them, as under plain
``python`` or ``torchrun``, :func:`report` does nothing.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

REPORT_VARIABLE = "ORCHESTRATOR_REPORT"
"""The path of the socket that takes reports: a line of JSON each."""
CHECKPOINTS_VARIABLE = "ORCHESTRATOR_CHECKPOINT_DIR"

_connection: socket.socket | None = None
_connected_to = ""
_steps = 0


def report(
    *,
    step: int | None = None,
    steps: int | None = None,
    loss: Any = None,
    samples: float = 0,
    **metrics: Any,
) -> None:
    """Report progress to the run, which shows it as that of any other run: loss, throughput, progress and time left.

    Each rank may call it, or rank 0 alone. Samples of the ranks are added, and losses weighted by them. Values may be
    numbers or tensors of one element; reading one from a GPU waits for it. Does nothing outside of a run.

    Args:
        step: the step that is done, from 1; None for one more than in the last call.
        steps: the number of steps of the whole run, for the progress and the time left; None if it is unknown.
        loss: the mean loss of ``samples``; None if there is none.
        samples: the number of samples that this rank has trained on since its last report.
        metrics: further values to log, averaged over the ranks that report them: ``accuracy=0.9`` is logged as
            ``train/accuracy``, and ``**{"val/accuracy": 0.9}`` under its own name.
    """
    global _steps
    _steps = _steps + 1 if step is None else step
    if (path := os.environ.get(REPORT_VARIABLE)) is None:
        return
    message = {
        "time": time.time(),
        "step": _steps,
        "steps": steps,
        "loss": None if loss is None else float(loss),
        "samples": float(samples),
        "metrics": {name: float(value) for name, value in metrics.items()},
    }
    _send(path, json.dumps(message).encode() + b"\n")


def checkpoint_dir() -> Path:
    """Return a directory for the checkpoints of the script, which restarts of the run find as it was.

    It is the same on all ranks of a run. Outside of a run, it is ``checkpoints`` in the working directory.
    """
    path = Path(os.environ.get(CHECKPOINTS_VARIABLE, "checkpoints"))
    path.mkdir(parents=True, exist_ok=True)
    return path


def _send(path: str, line: bytes) -> None:
    """Send a line to the worker; a worker that has gone is no error, because it ends this process itself."""
    global _connection, _connected_to
    try:
        if _connection is None or _connected_to != path:  # a process may run one script after another
            _connected_to = path
            _connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            _connection.connect(path)
        _connection.sendall(line)
    except OSError:
        os.environ.pop(REPORT_VARIABLE, None)
