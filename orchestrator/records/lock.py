"""Locks between processes, time on a file system that several hosts share, and which process drives a run.

Neither a clock step nor another container can confuse what identifies a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import getpass
import os
import platform
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
"""Loaded before a process forks, because its child must not wait for a loader that another thread has locked."""
_START_TICKS = 19
"""The index of ``starttime`` among the fields of ``/proc/<pid>/stat`` after the name of the program."""


def this_process() -> dict[str, Any]:
    """Return what identifies this process, as JSON values.

    A process id means something only within one PID namespace of one boot of one machine. The start time is in clock
    ticks since that boot: in seconds since the epoch, it would change whenever the clock is set. A time namespace may
    count from another moment.
    """
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "start_ticks": _start_ticks("self"),
        **_surroundings(),
    }


def is_visible(process: Mapping[str, Any]) -> bool:
    """Return whether :func:`is_alive` can find ``process``: it belongs to this boot and to these namespaces."""
    here = _surroundings()
    if None in here.values():
        here["host"] = socket.gethostname()  # fall back to the host name
    return all(process.get(key) == value for key, value in here.items())


def is_alive(process: Mapping[str, Any]) -> bool:
    """Return whether a process, described by :func:`this_process`, is visible from here and lives."""
    if not is_visible(process):
        return False
    try:
        state, *fields = _stat(process["pid"])
        return int(fields[_START_TICKS - 1]) == process["start_ticks"] and state not in "ZX"
    except (OSError, KeyError, ValueError, IndexError):
        return False


def user_name() -> str:
    """Return the name of the user to whom this process belongs; the number if the system has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def process_started_at() -> float:
    """Return when this process was created, in seconds since the epoch, accurate to 10 ms.

    psutil's ``create_time`` is up to a second off, because it adds to a boot time in whole seconds.
    """
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - _start_ticks("self") / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel send the signal ``number`` to this process when the thread that started it ends. Linux only."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def _surroundings() -> dict[str, Any]:
    """What a process id refers to; None for what /proc does not provide."""
    try:
        boot: str | None = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = None
    return {"boot_id": boot, "pid_namespace": _namespace("pid"), "time_namespace": _namespace("time")}


def _namespace(kind: str) -> int | None:
    try:
        return Path(f"/proc/self/ns/{kind}").stat().st_ino
    except OSError:
        return None


def _start_ticks(pid: int | str) -> int:
    return int(_stat(pid)[_START_TICKS])


def _stat(pid: int | str) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` after the name of the program, which may contain spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def machine_facts() -> dict[str, str]:
    """Return the name of the machine, its processor, and the number of cores that this process may use."""
    return {"host": socket.gethostname(), "processor": processor(), "cores": str(len(os.sched_getaffinity(0)))}


def processor() -> str:
    """Return the model of the processor; empty if it is not known."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        return platform.processor()
