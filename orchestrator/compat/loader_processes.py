"""The processes behind the iterator of a ``DataLoader``: how they failed, and their end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal


def loader_failure(error: RuntimeError) -> Literal["died", "timed out"] | None:
    """Return what an error of a ``DataLoader`` says about its processes; None if it says nothing about them."""
    text = str(error)
    if text.startswith("DataLoader worker"):
        return "died"
    return "timed out" if text.startswith("DataLoader timed out") else None


def loader_exit_codes(iterator: Any) -> list[int]:
    """Return the non-zero exit codes of the processes behind the iterator of a ``DataLoader``."""
    return [process.exitcode for process in getattr(iterator, "_workers", ()) if process.exitcode]


def end_loader_processes(iterator: Any, *, terminate_after_s: float) -> None:
    """End the processes behind the iterator of a ``DataLoader``, and wait for them.

    torch asks them to end, and a process notices between two batches. One that is still reading after
    ``terminate_after_s`` gets a SIGTERM.
    """
    processes = iterator._workers
    overdue = threading.Timer(terminate_after_s, _terminate, (processes,))
    overdue.start()
    try:
        iterator._shutdown_workers()
    finally:
        overdue.cancel()


def _terminate(processes: Sequence[Any]) -> None:
    for process in processes:
        process.terminate()
