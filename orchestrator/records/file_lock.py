"""Locks on files, between processes."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_S = 0.05


@contextlib.contextmanager
def locked(path: Path, *, timeout_s: float) -> Iterator[bool]:
    """Hold an exclusive lock on the file ``path`` during the block; yields False if another process keeps it.

    On a file system without locks, it yields True at once.
    """
    deadline = time.monotonic() + timeout_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(_POLL_S)
                continue
            except OSError:  # ENOLCK, ENOTSUP, ENOSYS
                pass
            yield True
            return
