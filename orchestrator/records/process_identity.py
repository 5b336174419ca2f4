"""Which process drives a run, in terms that neither a clock step nor another container can confuse; its machine."""

from __future__ import annotations

import ctypes
import getpass
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
