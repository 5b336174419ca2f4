"""Readings of every GPU of the node, and of who uses it, through NVIDIA's management library (NVML)."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

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
