"""The system metrics of a node: its CPUs, its memory, its GPUs."""

from __future__ import annotations

import psutil

from orchestrator.worker.measure.gpu_meter import GpuMeter


class CpuMeter:
    """CPU utilization of the node since the last reading.

    ``psutil.cpu_percent`` does not serve: it keeps its last reading per thread, and Ray runs actor methods in several.
    """

    def __init__(self) -> None:
        self._busy_s, self._total_s = _cpu_seconds()

    def percent(self) -> float | None:
        """Return the utilization over all CPUs, 0 to 100; None if the kernel's clock has not advanced."""
        busy_s, total_s = self._busy_s, self._total_s
        self._busy_s, self._total_s = _cpu_seconds()
        if self._total_s <= total_s:
            return None
        return min(100.0, max(0.0, 100 * (self._busy_s - busy_s) / (self._total_s - total_s)))


def _cpu_seconds() -> tuple[float, float]:
    """Busy and total CPU time since boot. Linux counts the time of guests in the user's time, too."""
    times = psutil.cpu_times()._asdict()
    total_s = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
    return total_s - times["idle"] - times.get("iowait", 0.0), total_s


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
