"""Locks between processes, and time on a file system that several hosts share."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

LOCK_TIMEOUT_S = 10.0
"""Wait this long for a lock. Each is held for the time of a few small files."""
ABANDONED_S = 60.0
"""Age in seconds after which a lock file counts as abandoned."""
_POLL_S = 0.02
_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def locked(path: Path, *, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock of the file ``path``, which is created if missing, during the block.

    The lock is a ``flock``, which ends with the process that holds it and which NFS passes on to the server. On
    a file system that has no such locks, the existence of a second file beside ``path`` is the lock.

    Raises:
        TimeoutError: another process has held the lock for ``timeout_s`` seconds.
        OSError: the file cannot be opened.
    """
    deadline = time.monotonic() + timeout_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _wait(path, deadline)
            except OSError as e:
                if e.errno not in _NO_FLOCK:
                    raise
                with locked_by_existence(path.with_name(f"{path.name}.held"), deadline=deadline):
                    yield
                return
        yield


@contextlib.contextmanager
def locked_if_free(path: Path, *, timeout_s: float = 0.0) -> Iterator[bool]:
    """Hold the lock as :func:`locked` does; yields False if another process still has it at the timeout.

    Raises:
        OSError: the file cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        acquired = True
        try:
            stack.enter_context(locked(path, timeout_s=timeout_s))
        except TimeoutError:
            acquired = False
        yield acquired


@contextlib.contextmanager
def locked_by_existence(path: Path, *, deadline: float) -> Iterator[None]:
    """Create ``path`` exclusively, and remove it after the block.

    A file that is older than :data:`ABANDONED_S` is taken away from its dead creator. ``deadline`` is in seconds of
    ``time.monotonic()``. Raises as :func:`locked`.
    """
    while True:
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            break
        except FileExistsError:
            _remove_abandoned(path)
            _wait(path, deadline)
    try:
        yield
    finally:
        # A process that took this one for dead may have replaced the file by its own, which cannot have the same inode
        # number while this one is open.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file)):
                path.unlink()
        os.close(file)


def _wait(path: Path, deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise TimeoutError(errno.ETIMEDOUT, "another process has kept it locked", str(path))
    time.sleep(_POLL_S)


def _remove_abandoned(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if now_on(path.parent) - path.stat().st_mtime < ABANDONED_S:
            return
        mine = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        path.rename(mine)  # of several processes that find it abandoned, one succeeds
        if now_on(path.parent) - mine.stat().st_mtime < ABANDONED_S:
            # Another process was faster, and this is its new lock. Give it back unless there is a third one already.
            with contextlib.suppress(FileExistsError):
                os.link(mine, path)
        mine.unlink()


def now_on(directory: Path) -> float:
    """Return the time of the clock that stamps the files in ``directory``, in seconds since the epoch.

    That is the clock of the file server, from which the local clock may differ by any amount.

    Raises:
        OSError: no file can be created there.
    """
    probe = directory / f".probe-{uuid.uuid4().hex}"
    file = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        return os.fstat(file).st_mtime
    finally:
        os.close(file)
        probe.unlink(missing_ok=True)


def changed_at(path: Path) -> float:
    """Return when ``path`` was last changed, by the clock that stamps it.

    Raises:
        OSError: there is no such file.
    """
    file = os.open(path, os.O_RDONLY)  # opening makes NFS ask the server, where stat() may answer from a cache
    try:
        return os.fstat(file).st_mtime
    finally:
        os.close(file)
