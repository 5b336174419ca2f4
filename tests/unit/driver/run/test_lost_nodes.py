"""Which addresses the survivors of lost nodes are told, with a gang and nodes that need no Ray."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.machines.simulated import Driver, Gang
from orchestrator.driver.nodes import node_watch
from orchestrator.driver.nodes.node_watch import NodeWatch
from orchestrator.driver.run.health import Health
from orchestrator.policy.failure import Outcomes
from orchestrator.protocol.messages import WorkerInfo


class FakeNodes:
    """Nodes that the probes find ``silent``; the probes of those ``without_probe`` are not up."""

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.found_silent: set[str] = set()
        self.without_probe: set[str] = set()

    def silent(self, workers: object, now: float) -> set[str]:
        return self.found_silent

    def has_answered(self, node_id: str) -> bool:
        return node_id not in self.without_probe

    def is_stopped(self, worker: WorkerInfo) -> bool:
        return False


def health_of(folder: Path, nodes: Any) -> tuple[Health, Gang]:
    driver = Driver(folder, "abcd")
    driver.workers.nodes = nodes
    telemetry: Any = SimpleNamespace(last_step={}, straggler=None)
    outcomes = Outcomes(world_size=4)
    made = Health(1, driver.context, driver.workers, telemetry=telemetry, outcomes=outcomes, earlier_hangs=())
    return made, driver.gang


def test_nodes_that_fall_silent_one_after_the_other_are_all_lost(tmp_path: Path) -> None:
    nodes = FakeNodes()
    (health, gang), silent = health_of(tmp_path, nodes), nodes.found_silent
    health.check({}, 0.0)
    assert health.unreachable() == ()
    silent.add("b")
    health.check({}, 1.0)
    assert health.unreachable() == ("10.0.0.1",)
    silent.add("d")
    health.check({}, 2.0)
    assert health.unreachable() == ("10.0.0.1", "10.0.0.3")
    assert gang.killed == [1], "the other rank is lost when the generation ends"


@pytest.mark.parametrize(("without_probe", "lost"), [({"b"}, {"b"}), (set(), set())])
def test_the_node_of_a_silent_worker_is_lost_unless_its_probe_is_up(
    without_probe: set[str], lost: set[str], tmp_path: Path
) -> None:
    """As when a link is cut in the first seconds of a run."""
    nodes = FakeNodes()
    health, gang = health_of(tmp_path, nodes)
    gang.silent, nodes.without_probe = {1}, without_probe
    health.check({}, 0.0)
    health.check({}, 61.0)
    assert (gang.killed, nodes.lost) == ([1], lost)


# Hosts that are lost together ---------------------------------------------------------------------


def test_hosts_that_do_not_answer_are_waited_for_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, all_asked = NodeWatch(3.0), threading.Barrier(3)
    watch._raylets = {name: (name, 1) for name in ("a", "b", "c", "not asked")}

    def connect(address: tuple[str, int], timeout: float) -> Any:
        all_asked.wait(10)  # breaks if one is asked after the other
        raise TimeoutError

    monkeypatch.setattr(node_watch.socket, "create_connection", connect)
    assert watch.find_gone(["a", "b", "unknown", "c"]) == ["a", "b", "c"]
