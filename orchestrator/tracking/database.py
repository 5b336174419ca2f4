"""Create MLflow's SQLite database so that other processes see it either not at all or complete."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path

from orchestrator.records.lock import locked


def create_database(path: Path, migrate: Callable[[Path], None], *, timeout_s: float) -> None:
    """Create the database at ``path`` unless it exists. An empty file counts as no database.

    MLflow creates its tables in many steps, and a database that was left in the middle of them cannot be opened again.
    So the tables are created in a file beside it, which is then renamed. Of several processes, one does this, and the
    others wait.

    Args:
        path: the database file.
        migrate: creates the tables in the file that it is given.
        timeout_s: the longest wait for another process.

    Raises:
        TimeoutError: another process still holds the lock.
    """
    if _exists(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock"), timeout_s=timeout_s):
        if _exists(path):
            return
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.new*"):  # by a process that was killed
            left.unlink(missing_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            migrate(temporary)
            if not _exists(path):  # a process that does not know this lock may have created it
                temporary.replace(path)
        finally:
            for suffix in ("", "-journal", "-wal", "-shm"):
                temporary.with_name(temporary.name + suffix).unlink(missing_ok=True)


def _exists(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False
