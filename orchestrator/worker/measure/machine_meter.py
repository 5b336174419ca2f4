"""How much of the CPUs of its node this process uses, and how much all processes do; and others of its GPU."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from orchestrator.protocol.machine_use import MachineUse

MIN_INTERVAL_S = 0.25
"""A reading takes a few tenths of a millisecond, and the kernel counts hundredths of a second."""
_PROC = Path("/proc")


class MachineMeter:
    """Measures intervals, which follow one another.

    The CPUs are those that this process may use. A child that ends counts with what it had used at the last reading.
    ``others_gpu_pct`` returns what others use of its GPU; None if it has none.
    """

    def __init__(self, others_gpu_pct: Callable[[], float | None] = lambda: None) -> None:
        self._others_gpu_pct = others_gpu_pct
        self.restart()

    def restart(self) -> None:
        """Begin an interval now."""
        self._began = time.monotonic()
        self._busy_s, self._idle_s = _cpus()
        self._own_s = _own()

    def read(self, *, least_s: float = MIN_INTERVAL_S) -> MachineUse | None:
        """End the interval and begin the next; None, and no end, if it has not lasted ``least_s``."""
        if time.monotonic() - self._began < least_s:
            return None
        own_s, busy_s, idle_s = self._own_s, self._busy_s, self._idle_s
        self.restart()
        own = sum(max(0.0, seconds - own_s.get(pid, 0.0)) for pid, seconds in self._own_s.items())
        return MachineUse(
            own_s=own,
            busy_s=max(0.0, self._busy_s - busy_s),
            idle_s=max(0.0, self._idle_s - idle_s),
            others_gpu_pct=self._others_gpu_pct(),
        )


def _cpus() -> tuple[float, float]:
    """Return the CPU seconds since boot that were used and that stood idle. Time that a hypervisor took is used."""
    busy = idle = 0.0
    allowed = os.sched_getaffinity(0)
    for cpu, times in enumerate(psutil.cpu_times(percpu=True)):
        if cpu in allowed:
            free = times.idle + times.iowait
            busy += sum(times) - times.guest - times.guest_nice - free
            idle += free
    return busy, idle


def _own() -> dict[int, float]:
    """Return the CPU seconds of this process and of those that it has started, by process id."""
    found = {os.getpid(): time.process_time()}
    unseen = _children(os.getpid())
    while unseen:
        pid = unseen.pop()
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            found[pid] = times.user + times.system
            unseen += _children(pid)
    return found


def _children(pid: int) -> list[int]:
    """Return the children of a process, which is much cheaper to ask for than the parents of all processes."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found
