"""What ends a wait for resources, and what is reported meanwhile, without Ray."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from helpers.plans import config_of
from helpers.recorder import Recorder
from orchestrator.config.redact import Redactor
from orchestrator.driver import waiting
from orchestrator.driver.calls import NoWorkersError
from orchestrator.driver.event_stream import EventStream
from orchestrator.driver.signals import StopSignals
from orchestrator.driver.waiting import Interrupted, ResourceWait, WaitMonitor
from orchestrator.policy.shortage import ClusterState, NodeState, Request
from orchestrator.protocol.events import WaitingForResources
from orchestrator.records.lease import SupersededError

REQUEST = Request(count=4, each={"CPU": 0.5, "GPU": 1})
STATE = ClusterState(
    nodes=[
        NodeState(node_id="a", name="gpu-1", address="10.0.0.4", total={"CPU": 8, "GPU": 4}, free={"CPU": 8, "GPU": 3})
    ]
)
WHY = "need 4 x {CPU: 0.5, GPU: 1}; free 3; node gpu-1 (10.0.0.4): 1 of 4 GPUs held by other Ray tasks"


class FakeLease:
    superseded = False

    def check(self) -> None:
        if self.superseded:
            raise SupersededError


class Parts:
    """A wait with a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now))
        monkeypatch.setattr(waiting, "cluster_state", lambda **_: STATE)
        self.recorder, self.lease, self.stop = Recorder(), FakeLease(), StopSignals()
        monitor = WaitMonitor(EventStream([self.recorder], Redactor()), self.lease, self.stop)  # type: ignore[arg-type]
        config = config_of("cluster.pending_timeout_s=60").cluster
        self.wait = ResourceWait("3 workers", REQUEST, config, monitor, label="run", trouble=dict)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(monkeypatch)


def test_a_wait_is_reported_every_few_seconds(parts: Parts) -> None:
    for parts.now in (1.0, 2.5, 6.0, 7.6, 8.0, 13.0):
        parts.wait.check()
    reports = [event for event in parts.recorder.seen if isinstance(event, WaitingForResources)]
    assert [(r.waited_s, r.wanted, r.why) for r in reports] == [
        (2.5, "3 workers", WHY),
        (7.6, "3 workers", WHY),
        (13.0, "3 workers", WHY),
    ]


def test_a_wait_ends_after_its_timeout_and_says_why(parts: Parts) -> None:
    parts.now = 61.0
    with pytest.raises(NoWorkersError) as error:
        parts.wait.check()
    assert f"no room for 3 workers within 61 s: {WHY}; free some" in str(error.value)
    assert "cluster.pending_timeout_s" in str(error.value)


def test_a_wait_ends_at_a_signal(parts: Parts) -> None:
    parts.stop.received = signal.SIGTERM
    with pytest.raises(Interrupted):
        parts.wait.check()


def test_a_wait_ends_when_another_driver_takes_over(parts: Parts) -> None:
    parts.lease.superseded = True
    with pytest.raises(SupersededError):
        parts.wait.check()
