"""The use of a node: by this process, by all processes, and as system metrics."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from orchestrator.protocol.machine_use import MachineUse
from orchestrator.worker.measure.gpu_meter import GpuMeter

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


class CpuMeter:
    """CPU utilization of the node since the last reading.

    ``psutil.cpu_percent`` does not serve: it keeps its last reading per thread, and Ray runs actor methods in several.
    """

    def __init__(self) -> None:
        self._busy_s, self._idle_s = _cpus(allowed_only=False)

    def percent(self) -> float | None:
        """Return the utilization over all CPUs, 0 to 100; None if the kernel's clock has not advanced."""
        before_s, idle_before_s = self._busy_s, self._idle_s
        self._busy_s, self._idle_s = _cpus(allowed_only=False)
        busy_s, total_s = self._busy_s - before_s, self._busy_s + self._idle_s - before_s - idle_before_s
        return None if total_s <= 0 else min(100.0, max(0.0, 100 * busy_s / total_s))


def system_metrics(cpu: CpuMeter, gpus: GpuMeter) -> dict[str, float]:
    """Return the system metrics of this node by the names of MLflow, without the prefix ``system/<node>/``."""
    memory = psutil.virtual_memory()
    readings = {
        "system_memory_usage_megabytes": memory.used / 1e6,
        "system_memory_usage_percentage": memory.percent,
    }
    if (percent := cpu.percent()) is not None:
        readings["cpu_utilization_percentage"] = percent
    return {**readings, **gpus.read()}


def _cpus(*, allowed_only: bool = True) -> tuple[float, float]:
    """Return the CPU seconds since boot that were used and that stood idle, of the CPUs that this process may use.

    Time that a hypervisor took is used. Linux counts the time of guests in the user's time, too.
    """
    busy = idle = 0.0
    allowed = os.sched_getaffinity(0)
    for cpu, times in enumerate(psutil.cpu_times(percpu=True)):
        if cpu in allowed or not allowed_only:
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
