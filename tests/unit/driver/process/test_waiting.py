"""What ends a wait for resources, and what is reported meanwhile, without Ray."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.files.golden import Golden
from helpers.machines.plans import config_of
from helpers.machines.simulated import Driver
from orchestrator.driver.process import waiting
from orchestrator.driver.process.calls import NoWorkersError, UnfitError
from orchestrator.driver.process.waiting import Interrupted, ResourceWait, UnfitLimit, WaitMonitor
from orchestrator.policy.shortage import ClusterState, NodeState, Request
from orchestrator.protocol.events import WaitingForResources
from orchestrator.records.lease import SupersededError
from orchestrator.records.lock import this_process

REQUEST = Request(count=4, each={"CPU": 0.5, "GPU": 1})
STATE = ClusterState(
    nodes=[
        NodeState(node_id="a", name="gpu-1", address="10.0.0.4", total={"CPU": 8, "GPU": 4}, free={"CPU": 8, "GPU": 3})
    ]
)
WHY = "need 4 x {CPU: 0.5, GPU: 1}; free 3; node gpu-1 (10.0.0.4): 1 of 4 GPUs held by other Ray tasks"


class Parts:
    """A wait with a clock that the test sets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now))
        monkeypatch.setattr(waiting, "cluster_state", lambda **_: STATE)
        self.driver = Driver(folder)
        context = self.driver.context
        self._monitor = WaitMonitor(context.events, context.lease, context.stop)
        self.wait = self.new_wait()

    def new_wait(self, *words: str) -> ResourceWait:
        config = config_of("cluster.pending_timeout_s=60", *words).cluster
        return ResourceWait("3 workers", REQUEST, config, self._monitor, label="run", trouble=dict, unfit_timeout_s=10)


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(tmp_path, monkeypatch)


def test_a_wait_is_reported_every_few_seconds(parts: Parts) -> None:
    for parts.now in (1.0, 2.5, 6.0, 7.6, 8.0, 13.0):
        parts.wait.check()
    reports = [event for event in parts.driver.recorder.seen if isinstance(event, WaitingForResources)]
    assert [(r.waited_s, r.wanted, r.why) for r in reports] == [
        (2.5, "3 workers", WHY),
        (7.6, "3 workers", WHY),
        (13.0, "3 workers", WHY),
    ]


def test_a_wait_ends_after_its_timeout_and_says_why(parts: Parts, golden: Golden) -> None:
    parts.now = 61.0
    with golden.raises(NoWorkersError):
        parts.wait.check()


def test_a_cluster_that_is_too_small_for_too_long_ends_a_wait(parts: Parts, golden: Golden) -> None:
    limit = UnfitLimit(10.0)
    for parts.now, is_unfit in ((0.0, True), (9.0, True), (9.5, False), (10.0, True), (20.0, True)):
        limit.check(is_unfit, str)
    parts.now = 20.5
    UnfitLimit(None).check(True, str)
    with golden.raises(UnfitError):
        limit.check(True, lambda: "need 8")


def test_a_wait_for_resources_ends_when_the_cluster_shrinks_and_adds_no_nodes(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    fixed, growing = parts.new_wait(), parts.new_wait("cluster.autoscaling=true")
    monkeypatch.setattr(waiting, "cluster_state", lambda **_: ClusterState(nodes=[]))
    for parts.now in (3.0, 9.0):
        fixed.check()
        growing.check()
    parts.now = 15.0
    growing.check()
    with golden.raises(UnfitError):
        fixed.check()


def test_a_wait_ends_at_a_signal(parts: Parts) -> None:
    parts.driver.context.stop.received = signal.SIGTERM
    with pytest.raises(Interrupted):
        parts.wait.check()


def test_a_wait_ends_when_another_driver_takes_over(parts: Parts) -> None:
    parts.driver.run_dir.update_record(driver={**this_process(), "boot_id": "of another host"})
    assert parts.driver.context.lease.renew()
    assert parts.driver.context.lease.renew()
    with pytest.raises(SupersededError):
        parts.wait.check()
