"""What ends a wait for resources, and what is reported meanwhile, without Ray."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.recorder import Recorder
from orchestrator.driver import waiting
from orchestrator.driver.calls import GangError
from orchestrator.driver.event_stream import EventStream
from orchestrator.driver.signals import StopSignals
from orchestrator.driver.waiting import Interrupted, ResourceWait, WaitMonitor
from orchestrator.protocol.events import WaitingForResources
from orchestrator.records.lease import SupersededError

PLAN: Any = SimpleNamespace(world_size=3, spares=1, cpus_per_worker=0.5, gpus_per_worker=1)


class FakeLease:
    superseded = False

    def check(self) -> None:
        if self.superseded:
            raise SupersededError


class Parts:
    """A wait with a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(waiting, "_holders", lambda label: "other (2 bundles)")
        self.recorder, self.lease, self.stop = Recorder(), FakeLease(), StopSignals()
        monitor = WaitMonitor(EventStream([self.recorder]), self.lease, self.stop)  # type: ignore[arg-type]
        self.wait = ResourceWait("3 workers", PLAN, label="run", timeout_s=60, monitor=monitor)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(monkeypatch)


def test_a_wait_is_reported_every_few_seconds(parts: Parts) -> None:
    for parts.now in (1.0, 5.0, 5.5, 6.0, 10.0, 11.0):
        parts.wait.check()
    reports = [event for event in parts.recorder.seen if isinstance(event, WaitingForResources)]
    assert [(r.waited_s, r.wanted, r.holders) for r in reports] == [
        (5.5, "4 x 0.5 CPU and 1 GPU", "other (2 bundles)"),
        (11.0, "4 x 0.5 CPU and 1 GPU", "other (2 bundles)"),
    ]


def test_a_wait_ends_after_its_timeout(parts: Parts) -> None:
    parts.now = 61.0
    with pytest.raises(GangError, match=r"no room for 3 workers within 61 s .*cluster\.pending_timeout_s"):
        parts.wait.check()


def test_a_wait_ends_at_a_signal(parts: Parts) -> None:
    parts.stop.received = signal.SIGTERM
    with pytest.raises(Interrupted):
        parts.wait.check()


def test_a_wait_ends_when_another_driver_takes_over(parts: Parts) -> None:
    parts.lease.superseded = True
    with pytest.raises(SupersededError):
        parts.wait.check()
