"""What the restarting peers share: a worker that kills itself, checkpoints, and the measured cost of the kill."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

KILLED = "killed.json"


def die_once(folder: Path, step: int) -> None:
    """Kill this process (SIGKILL) before ``step``, unless an earlier process was killed there."""
    marker = folder / f"killed-{step}.json"
    if marker.exists():
        return
    marker.write_text(json.dumps({"time": time.time(), "step": step}))
    if not (folder / KILLED).exists():
        (folder / KILLED).write_text(marker.read_text())
    os.kill(os.getpid(), signal.SIGKILL)


def note_time(folder: Path, step: int, steps: int) -> None:
    """Record when the first step ended for the first time, and when the last step ended."""
    if step in (1, steps):
        path = folder / "times.json"
        times = json.loads(path.read_text()) if path.exists() else {"first": time.time()}
        path.write_text(json.dumps({**times, "last": time.time()}))


def note_recovery(folder: Path, resumed_at: int) -> None:
    """Record, after the first step of a process that resumed at ``resumed_at``, what the first kill has cost.

    Later calls, and calls in a process that did not resume from a checkpoint (``resumed_at=0``), do nothing.
    """
    result = folder / "recovery.json"
    if not resumed_at or result.exists() or not (folder / KILLED).exists():
        return
    killed = json.loads((folder / KILLED).read_text())
    seconds = time.time() - killed["time"]
    result.write_text(json.dumps({"seconds": seconds, "steps_lost": killed["step"] - 1 - resumed_at}))


def save(folder: Path, model: Any, optimizer: Any, step: int) -> None:
    """Write a checkpoint and rename it into place."""
    temporary = folder / f".checkpoint.{os.getpid()}"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, temporary)
    temporary.replace(folder / "checkpoint.pt")


def load(folder: Path, model: Any, optimizer: Any) -> int:
    """Load the checkpoint and return its step, or 0 if there is none."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
