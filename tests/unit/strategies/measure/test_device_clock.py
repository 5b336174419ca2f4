"""How long a device waits, and when it computes, by its own clock."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.parts.timed_stage import Clock


def test_blocks_add_up_until_the_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    timer = WaitTimer(torch.device("cpu"))
    for wait_s in (0.010, 0.030):
        with timer.waiting():
            now_s[0] += wait_s
        now_s[0] += 1.0  # computation
    assert timer.total_ms() == pytest.approx(40)
    timer.restart()
    assert timer.total_ms() == 0


def test_nothing_is_marked_while_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    timer, clock = WaitTimer(device), Clock(device)
    timer.restart(counts=False)
    clock.restart(records=False)

    def read() -> float:
        raise AssertionError("a clock was read")

    monkeypatch.setattr(time, "perf_counter", read)
    monkeypatch.setattr(time, "time", read)
    with timer.waiting(), clock.span("F", 0, 0):
        pass
    timer.restart()
    timer.pause()
    with timer.waiting():
        pass
    assert timer.total_ms() == 0


class BusyDevice:
    """A device that this machine lacks: it reaches a mark when its own work is done, but not before the host is there.

    Times are in milliseconds. ``waited``: how often the host has waited for it.
    """

    def __init__(self) -> None:
        self.host_ms = 0.0
        self.done_ms = 0.0
        self.waited = 0

    def enqueue(self, work_ms: float) -> None:
        self.done_ms = max(self.done_ms, self.host_ms) + work_ms

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        return _Event(self)


class _Event:
    def __init__(self, device: BusyDevice):
        self.device = device

    def record(self) -> None:
        self.reached_ms = max(self.device.done_ms, self.device.host_ms)

    def synchronize(self) -> None:
        self.device.waited += 1

    def elapsed_time(self, end: _Event) -> float:
        return end.reached_ms - self.reached_ms


@pytest.mark.parametrize(("work_ms", "waited_ms"), [(0.0, 8.0), (5.0, 3.0), (20.0, 0.0)])
def test_a_gpu_waits_only_when_its_own_work_is_done(
    monkeypatch: pytest.MonkeyPatch, work_ms: float, waited_ms: float
) -> None:
    device = BusyDevice()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    timer = WaitTimer(torch.device("cuda"))
    device.enqueue(work_ms)
    with timer.waiting():
        device.host_ms += 8.0
    assert device.waited == 0, "a step does not wait for the device"
    assert timer.total_ms() == pytest.approx(waited_ms)


def test_the_spans_of_a_gpu_are_when_it_computed_and_not_when_the_host_asked_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, now_s = BusyDevice(), 1000.0
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(time, "time", lambda: now_s)
    clock = Clock(torch.device("cuda"))
    clock.first_microbatch = 4
    for kind, microbatch, enqueued_at_ms, work_ms in [
        ("F", 0, 0.0, 10.0),
        ("F", 1, 1.0, 10.0),  # while the device is busy
        ("F", 1, 2.0, 5.0),  # the loss, which belongs to the forward pass
        ("B", 0, 40.0, 20.0),  # behind the gradient of another stage
    ]:
        device.host_ms = enqueued_at_ms
        with clock.span(kind, 3, microbatch):
            device.enqueue(work_ms)
    assert device.waited == 0, "a step does not wait for the device"
    spans = clock.spans()
    assert device.waited == 1
    begun_s = now_s - 0.060  # the device is done when the spans are read
    assert [(s.kind, s.stage, s.microbatch) for s in spans] == [("F", 3, 4), ("F", 3, 5), ("B", 3, 4)]
    assert [(s.start - begun_s, s.end - begun_s) for s in spans] == [
        pytest.approx(ends, abs=1e-6) for ends in [(0.000, 0.010), (0.010, 0.025), (0.040, 0.060)]
    ]
    clock.restart()
    assert clock.spans() == ()
