"""Readings of GPUs: from a stand-in of the driver's library, and from the real one without a driver."""

import os
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.records.runs import wait_for
from orchestrator.worker.measure import meters
from orchestrator.worker.measure.meters import GpuMeter, GpuSharing


class StandInError(Exception):
    pass


class StandIn:
    """Two GPUs. ``unreadable`` names the functions that fail; ``xids`` counts the events of each GPU to be read."""

    NVMLError = StandInError
    NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *unreadable: str) -> None:
        self.unreadable = set(unreadable)
        self.xids: Counter[int] = Counter()
        self.used: list[tuple[int, int, int]] = []  # time, process, percent
        self.initialised = 0
        self.answers = threading.Event()
        self.answers.set()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "unreadable"):
            raise StandInError(name)
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        self.initialised += 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return {"GPU-1": 1}[uuid]

    def nvmlDeviceGetProcessUtilization(self, handle: int, since: int) -> Any:
        return [SimpleNamespace(pid=pid, timeStamp=at, smUtil=used) for at, pid, used in self.used if at > since]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self.answers.wait(timeout=10)
        return SimpleNamespace(gpu=90 + handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=20e9 * (handle + 1), total=80e9)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 350_000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 700_000

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 60 + handle

    def nvmlDeviceGetTotalEccErrors(self, handle: int, error_type: int, counter_type: int) -> int:
        assert (error_type, counter_type) == (1, 0)
        return handle

    def nvmlEventSetCreate(self) -> list[int]:
        return []

    def nvmlDeviceRegisterEvents(self, handle: int, event_types: int, events: list[int]) -> None:
        assert event_types == 8
        events.append(handle)

    def nvmlEventSetWait(self, events: list[int], timeout_ms: int) -> None:
        assert timeout_ms == 0
        if not self.xids[events[0]]:
            raise StandInError("timeout")
        self.xids[events[0]] -= 1


def test_every_gpu_of_the_node_is_read() -> None:
    assert GpuMeter(StandIn).read() == {
        "gpu_0_utilization_percentage": 90,
        "gpu_0_memory_usage_megabytes": 20_000,
        "gpu_0_memory_usage_percentage": 25,
        "gpu_0_power_usage_watts": 350,
        "gpu_0_power_usage_percentage": 50,
        "gpu_0_temperature_celsius": 60,
        "gpu_0_ecc_uncorrected_errors": 0,
        "gpu_0_xid_errors": 0,
        "gpu_1_utilization_percentage": 91,
        "gpu_1_memory_usage_megabytes": 40_000,
        "gpu_1_memory_usage_percentage": 50,
        "gpu_1_power_usage_watts": 350,
        "gpu_1_power_usage_percentage": 50,
        "gpu_1_temperature_celsius": 61,
        "gpu_1_ecc_uncorrected_errors": 1,
        "gpu_1_xid_errors": 0,
    }


def test_errors_add_up() -> None:
    nvml = StandIn()
    meter = GpuMeter(lambda: nvml)
    meter.read()
    for _ in range(2):
        nvml.xids[1] = 2
        readings = meter.read()
    assert (readings["gpu_0_xid_errors"], readings["gpu_1_xid_errors"]) == (0, 4)
    assert nvml.initialised == 1


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        ("nvmlDeviceGetUtilizationRates", {"utilization_percentage"}),
        ("nvmlDeviceGetEnforcedPowerLimit", {"power_usage_watts", "power_usage_percentage"}),
        ("nvmlDeviceGetTotalEccErrors", {"ecc_uncorrected_errors"}),
        ("nvmlDeviceRegisterEvents", {"xid_errors"}),
    ],
)
def test_what_a_gpu_cannot_read_is_left_out(function: str, missing: set[str]) -> None:
    readings = GpuMeter(lambda: StandIn(function)).read()
    assert GpuMeter(StandIn).read().keys() - readings.keys() == {f"gpu_{i}_{name}" for i in (0, 1) for name in missing}


def test_without_the_library_or_a_driver_nothing_is_read() -> None:
    nvml = StandIn("nvmlInit")
    for found in (None, nvml):
        meter = GpuMeter(lambda found=found: found)  # type: ignore[misc]
        assert [meter.read(), meter.read()] == [{}, {}]


def test_a_driver_that_hangs_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "READING_WAIT_S", 0.05)
    nvml = StandIn()
    meter = GpuMeter(lambda: nvml)
    nvml.answers.clear()
    assert [meter.read() for _ in range(3)] == [{}, {}, {}]
    (reader,) = (thread for thread in threading.enumerate() if thread.name == "gpu-meter")
    nvml.answers.set()
    reader.join(timeout=5)
    monkeypatch.undo()
    assert meter.read()["gpu_1_utilization_percentage"] == 91


def test_the_real_library_without_a_driver() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert GpuMeter().read() == {}
    else:
        pytest.skip("this machine has a driver")


def others_pct(nvml: StandIn, used: list[tuple[int, int, int]]) -> float | None:
    """What is told when the GPU was ``used`` like this, after it had been used by others before."""
    sharing = GpuSharing("GPU-1", lambda: nvml)
    found = None
    for samples in ([(1, os.getpid(), 1), (1, 3, 99)], [(1, 3, 99), *used], []):
        nvml.used = samples
        found = sharing.others_pct()
        wait_for(lambda: not any(thread.name == "gpu-sharing" for thread in threading.enumerate()))
    return found


def test_what_others_use_of_a_gpu_is_told() -> None:
    own = os.getpid()
    assert others_pct(StandIn(), [(5, own, 60), (5, 1, 40), (6, own, 50), (6, 1, 20), (6, 2, 5)]) == 35
    assert others_pct(StandIn(), [(5, own, 60)]) == 0


@pytest.mark.parametrize("unreadable", ["", "nvmlInit", "nvmlDeviceGetProcessUtilization"])
def test_processes_that_cannot_be_told_apart_are_not_taken_for_others(unreadable: str) -> None:
    assert others_pct(StandIn(unreadable), [(5, os.getpid() if unreadable else 2, 40), (5, 1, 40)]) is None
