"""The processes that a worker or a script has started, and theirs: what ends them all.

Each of them has the mark of its family in the environment with which it was started, whatever session and parent it has
by now. A process that clears its environment is still found as long as it is in the process group, or has its parent.

As a program, this file waits for the end of a worker, which may be a SIGKILL, and ends its family then. It imports only
the standard library, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

MARK = "ORCHESTRATOR_FAMILY"
"""The environment variable with the mark of a worker."""
_PR_SET_CHILD_SUBREAPER = 36
ROUNDS = 50
"""A process may start others while its family is ended."""
ROUND_S = 0.02


def end_family(mark: str, group: int, known: Collection[int] = ()) -> None:
    """Kill all processes of a family but this one.

    Args:
        mark: an environment variable with its value, which no other process has: ``NAME=VALUE``.
        group: the process group in which its first process has started others.
        known: further processes of the family.
    """
    killed: set[int] = set()
    for _ in range(ROUNDS):
        if not (found := set(_members(mark, group, known)) - {os.getpid()}):
            break
        killed |= found
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(ROUND_S)
    for pid in killed - {group}:
        with contextlib.suppress(OSError):  # the child of another process
            os.waitpid(pid, os.WNOHANG)


def adopt_orphans() -> None:
    """Let descendants of this process become its children when their parents end, so that it reaps them. Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _members(mark: str, group: int, known: Collection[int]) -> Iterator[int]:
    """Yield the processes with the mark, in the group or known, and their descendants; not those that have ended."""
    own = f"\0{mark}\0".encode()
    children: dict[int, list[int]] = {}
    found: list[int] = []
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended, or is another user's
            state, parent, in_group = (path / "stat").read_bytes().rpartition(b")")[2].split()[:3]
            if state in (b"Z", b"X"):
                continue
            children.setdefault(int(parent), []).append(int(path.name))
            if int(path.name) in known or int(in_group) == group or own in b"\0" + (path / "environ").read_bytes():
                found.append(int(path.name))
    seen: set[int] = set()
    while found:
        if (pid := found.pop()) not in seen:
            seen.add(pid)
            found += children.get(pid, [])
            yield pid


def guard(pid: int, mark: str) -> int | None:
    """Start a process that ends the family of the process ``pid`` when this has ended, however it ends.

    Returns:
        Its id; None if it cannot be started.
    """
    command = [sys.executable, "-I", "-S", __file__, str(pid), mark]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        started = subprocess.run(
            command, env={}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, check=True
        )
        return int(started.stdout)
    return None


def _main(pid: int, mark: str) -> None:
    """Tell the id of a process of its own, whose parent is not the worker, so that Ray does not end it with that."""
    if not hasattr(os, "pidfd_open"):  # not Linux
        sys.exit(1)
    worker = os.pidfd_open(pid)
    if (child := os.fork()) != 0:
        print(child, flush=True)
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(null, stream)
    select.select([worker], [], [])
    end_family(mark, pid)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
