"""The use of a node: by this process, by all processes, as system metrics, and of its GPUs through NVIDIA's NVML."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from orchestrator.protocol.metrics import MachineUse

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
    """Return the used and the idle CPU seconds since boot, of the CPUs that this process may use.

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


READING_WAIT_S = 0.5
"""Wait this long for the driver, which needs milliseconds unless a GPU is broken."""


def import_nvml() -> Any:
    """Return the module ``pynvml``; None if it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


class GpuMeter:
    """Reads all GPUs of the node by the names of MLflow, without the prefix ``system/<node>/``.

    A thread reads, because a call to the driver may hang with a broken GPU, and a worker has to answer heartbeats.
    """

    def __init__(self, import_nvml: Callable[[], Any] = import_nvml):
        """``import_nvml``: called at the first reading."""
        self._import_nvml = import_nvml
        self._devices: list[_Device] | None = None  # until the first reading
        self._reader: threading.Thread | None = None

    def read(self) -> dict[str, float]:
        """Return the readings; empty without the library or a driver, or while the driver does not answer."""
        if self._devices == [] or (self._reader is not None and self._reader.is_alive()):
            return {}
        readings: dict[str, float] = {}
        self._reader = threading.Thread(target=self._read_into, args=(readings,), name="gpu-meter", daemon=True)
        self._reader.start()
        self._reader.join(READING_WAIT_S)
        return {} if self._reader.is_alive() else readings

    def _read_into(self, readings: dict[str, float]) -> None:
        if self._devices is None:
            self._devices = _devices_of(self._import_nvml())
        for index, device in enumerate(self._devices):
            readings.update({f"gpu_{index}_{name}": value for name, value in device.readings()})


def _devices_of(nvml: Any) -> list[_Device]:
    if nvml is None:
        return []
    try:
        nvml.nvmlInit()
        return [_Device(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:  # there is no driver
        return []


class _Device:
    def __init__(self, nvml: Any, handle: Any):
        self._nvml = nvml
        self._handle = handle
        self._xid_errors = 0
        self._xid_events: Any = None
        with contextlib.suppress(nvml.NVMLError):
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            self._xid_events = events

    def readings(self) -> Iterator[tuple[str, float]]:
        """Yield what the device can read; not every device can read everything."""
        for read in (self._utilization, self._memory, self._power, self._temperature, self._errors, self._xids):
            with contextlib.suppress(self._nvml.NVMLError):
                yield from read().items()

    def _utilization(self) -> dict[str, float]:
        return {"utilization_percentage": self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu}

    def _memory(self) -> dict[str, float]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return {
            "memory_usage_megabytes": memory.used / 1e6,
            "memory_usage_percentage": 100 * memory.used / memory.total,
        }

    def _power(self) -> dict[str, float]:
        power_mw = self._nvml.nvmlDeviceGetPowerUsage(self._handle)
        limit_mw = self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle)
        return {"power_usage_watts": power_mw / 1e3, "power_usage_percentage": 100 * power_mw / limit_mw}

    def _temperature(self) -> dict[str, float]:
        return {
            "temperature_celsius": self._nvml.nvmlDeviceGetTemperature(self._handle, self._nvml.NVML_TEMPERATURE_GPU)
        }

    def _errors(self) -> dict[str, float]:
        nvml = self._nvml
        uncorrected, since_boot = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return {
            "ecc_uncorrected_errors": nvml.nvmlDeviceGetTotalEccErrors(self._handle, uncorrected, since_boot),
        }

    def _xids(self) -> dict[str, float]:
        """The critical errors (XID) since the first reading."""
        if self._xid_events is None:
            return {}
        with contextlib.suppress(self._nvml.NVMLError):  # NVML raises its timeout as soon as no event is left
            while True:
                self._nvml.nvmlEventSetWait(self._xid_events, 0)
                self._xid_errors += 1
        return {"xid_errors": self._xid_errors}


class GpuSharing:
    """Reads the GPU with the id ``uuid`` in threads, because a call to the driver may hang with a broken GPU."""

    def __init__(self, uuid: str, import_nvml: Callable[[], Any] = import_nvml):
        self._uuid = uuid
        self._import_nvml = import_nvml
        self._reader: threading.Thread | None = None
        self._handle: Any = None
        self._seen_at: int | None = None  # the driver's time of the newest sample
        self._found: float | None = None

    def others_pct(self) -> float | None:
        """Return the share of the time in which other processes used the GPU, and start the next reading.

        Returns:
            The share in percent between the last two calls; None if it is unknown: without the library, if the GPU does
            not count it, or if its process ids are not from this container.
        """
        if self._reader is not None and self._reader.is_alive():
            return None
        found, self._found = self._found, None
        self._reader = threading.Thread(target=self._read, name="gpu-sharing", daemon=True)
        self._reader.start()
        return found

    def _read(self) -> None:
        nvml = self._import_nvml()
        if nvml is None:
            return
        try:
            if self._handle is None:
                nvml.nvmlInit()
                self._handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen_at or 0)
        except nvml.NVMLError:
            return
        is_first, self._seen_at = self._seen_at is None, max((s.timeStamp for s in samples), default=self._seen_at)
        by_process: defaultdict[int, list[int]] = defaultdict(list)
        for sample in samples:
            by_process[sample.pid].append(sample.smUtil)
        if os.getpid() in by_process and not is_first:  # the first samples are of the time before
            self._found = sum(statistics.fmean(used) for pid, used in by_process.items() if pid != os.getpid())
