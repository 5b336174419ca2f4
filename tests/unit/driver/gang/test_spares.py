"""In which slots workers are started after a loss, and which are given back, with slots that need no Ray."""

from collections.abc import Collection, Iterable, Sequence, Set
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from helpers.files.golden import Golden
from orchestrator.driver.gang import spares
from orchestrator.driver.gang.spares import START_ATTEMPTS, Spares
from orchestrator.driver.nodes.node_watch import NodeWatch
from orchestrator.driver.process import calls
from orchestrator.protocol.messages import WorkerInfo


def info(slot: int, node_id: str = "a", **gpu: str) -> WorkerInfo:
    return WorkerInfo(node_id=node_id, node_ip="10.0.0.1", hostname=node_id, pid=slot, **gpu)


class Call:
    """A pending call; ``result`` is None until it has one."""

    def __init__(self) -> None:
        self.result: Any = None


class FakeSlots:
    """Slots 0 to 2 were reserved together, and each later one alone. ``nodes``: by slot, "a" if not given."""

    def __init__(self) -> None:
        self.nodes: dict[int, str | None] = {}
        self.started: dict[int, Call] = {}
        self.avoided: list[set[str]] = []
        self.killed: list[int] = []
        self.withdrawn: list[int] = []

    def placed(self, slots: Iterable[int]) -> dict[int, str]:
        return {slot: node for slot in slots if (node := self.nodes.get(slot, "a")) is not None}

    def reserve(self, *, avoid: Collection[str]) -> int:
        self.avoided.append(set(avoid))
        return 2 + len(self.avoided)

    def start(self, slot: int) -> None:
        self.started[slot] = Call()

    def actor(self, slot: int) -> Any:
        return SimpleNamespace(prepare=SimpleNamespace(remote=lambda _: self.started[slot]))

    def kill(self, slot: int) -> None:
        self.killed.append(slot)

    def is_alone(self, slot: int) -> bool:
        return slot > 2

    def withdraw(self, slot: int) -> bool:
        self.killed.append(slot)
        self.withdrawn.append(slot)
        return self.is_alone(slot)


class FakeAdmission:
    """Admits every node, except those that are ``unknown`` or ``refused``."""

    def __init__(self, nodes: NodeWatch) -> None:
        self.unknown: set[str] = set()
        self.refused: set[str] = set()
        self._nodes = nodes

    def trouble(self) -> dict[str, str]:
        return {**self._nodes.trouble(), **dict.fromkeys(self.refused, "is left out")}

    def has_changed(self, avoided: Set[str]) -> bool:
        return self.trouble().keys() != avoided

    def admits(self, node_id: str) -> bool | None:
        return None if node_id in self.unknown else node_id not in self.refused


def fake_wait(pending: Sequence[Call], *, num_returns: int = 1, timeout: float) -> tuple[list[Call], list[Call]]:
    return [c for c in pending if c.result is not None], [c for c in pending if c.result is None]


def fake_get(call: Call) -> Any:
    if isinstance(call.result, Exception):
        raise call.result
    return call.result


class Parts:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, one_node: bool = False) -> None:
        fake: Any = SimpleNamespace(wait=fake_wait, get=fake_get, exceptions=ray.exceptions)
        monkeypatch.setattr(spares, "ray", fake)
        monkeypatch.setattr(calls, "ray", fake)
        self.slots, self.nodes, self.warnings = FakeSlots(), NodeWatch(3.0), list[str]()
        self.admission = FakeAdmission(self.nodes)
        monitor: Any = SimpleNamespace(warn=self.warnings.append)
        slots: Any = self.slots
        admission: Any = self.admission
        self.spares = Spares(slots, self.nodes, admission, Any, monitor, one_node=one_node)  # type: ignore[arg-type]

    def comes_up(self, slot: int, node_id: str) -> list[int]:
        self.slots.started[slot].result = info(slot, node_id)
        return self.fit()

    def fit(self, *members: WorkerInfo) -> list[int]:
        """Return the spares that could take a rank beside ``members`` by now."""
        self.spares.advance(members)
        return self.spares.fit(members)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(monkeypatch)


def test_the_slot_of_a_dead_process_is_used_again(parts: Parts) -> None:
    parts.spares.vacate(1, "a")
    parts.spares.seek(1)
    parts.spares.seek(1)
    assert list(parts.slots.started) == [1]
    assert parts.comes_up(1, "a") == [1]
    assert not parts.slots.avoided


def test_a_worker_on_a_lost_node_is_sought_in_its_slot_and_elsewhere(parts: Parts) -> None:
    parts.nodes.lost.add("b")
    parts.spares.vacate(1, "b")
    parts.spares.seek(1)
    assert set(parts.slots.started) == {1, 3}
    assert parts.slots.avoided == [{"b"}]
    assert parts.comes_up(3, "a") == [3]
    parts.spares.refill(1)
    assert parts.slots.withdrawn == [1], "Ray keeps the slot, which was reserved with others"
    parts.spares.seek(1)
    assert set(parts.slots.started) == {1, 3, 4}


def test_a_node_that_is_found_dead_later_is_no_longer_relied_on(parts: Parts) -> None:
    parts.spares.vacate(1, "b")
    parts.spares.seek(1)
    assert set(parts.slots.started) == {1}
    parts.nodes.lost.add("b")
    parts.spares.seek(1)
    assert set(parts.slots.started) == {1, 3}


def test_a_stranded_slot_that_ray_has_moved_serves_as_well(parts: Parts) -> None:
    parts.nodes.lost.add("b")
    parts.spares.vacate(1, "b")
    parts.spares.seek(1)
    assert parts.comes_up(1, "c") == [1]
    parts.spares.refill(1)
    assert parts.slots.withdrawn == [3]
    parts.spares.seek(1)
    assert max(parts.slots.started) == 4, "what was withdrawn is gone"


def test_a_slot_that_ray_has_moved_to_a_late_node_is_used_when_that_has_answered(parts: Parts) -> None:
    """It was reserved with others, so that it cannot be given back alone."""
    parts.nodes.lost.add("b")
    parts.spares.vacate(1, "b")
    parts.slots.nodes, parts.admission.refused = {1: "late", 3: None, 4: None}, {"late"}
    parts.spares.seek(1)
    parts.spares.seek(1)
    assert list(parts.slots.started) == []
    assert parts.slots.avoided == [{"b", "late"}], "another one is sought meanwhile, once"
    parts.admission.refused.clear()
    assert parts.fit() == []
    assert parts.comes_up(1, "late") == [1]


def test_a_slot_that_ray_has_moved_from_a_draining_node_is_used(parts: Parts) -> None:
    parts.nodes.draining = ["c"]
    parts.slots.nodes = {1: "c", 3: None}
    parts.spares.vacate(1, "c")
    parts.spares.seek(1)
    assert list(parts.slots.started) == []
    parts.slots.nodes[1] = "d"
    assert parts.fit() == []
    assert parts.comes_up(1, "d") == [1]


def test_a_node_on_which_a_worker_starts_is_no_longer_lost(parts: Parts) -> None:
    parts.nodes.lost.add("b")
    parts.spares.vacate(1, "b")
    parts.spares.seek(1)
    assert parts.comes_up(1, "b") == [1]
    assert not parts.nodes.lost


def test_no_worker_starts_before_its_slot_has_a_node_and_the_node_has_reported(parts: Parts) -> None:
    parts.slots.nodes[3], parts.admission.unknown = None, {"new"}
    parts.spares.seek(1)
    parts.slots.nodes[3] = "new"
    assert parts.fit() == []
    parts.spares.seek(1)
    assert (list(parts.slots.started), len(parts.slots.avoided)) == ([], 1)
    parts.admission.unknown.clear()
    assert parts.fit() == []
    assert parts.comes_up(3, "new") == [3]


def test_the_slot_on_a_node_that_is_refused_is_given_back_and_another_is_sought(parts: Parts) -> None:
    parts.slots.nodes[3], parts.admission.refused = "unfit", {"unfit"}
    parts.spares.seek(1)
    assert (list(parts.slots.started), parts.slots.withdrawn) == ([], [3])
    parts.spares.seek(1)
    assert parts.slots.avoided == [{"unfit"}, {"unfit"}]
    assert parts.comes_up(4, "a") == [4]


def test_a_slot_that_has_no_node_yet_may_be_on_a_late_one_that_has_answered(parts: Parts) -> None:
    parts.slots.nodes, parts.admission.refused = {3: None, 4: None}, {"late"}
    parts.spares.seek(1)
    parts.spares.seek(1)
    assert (parts.slots.avoided, parts.slots.withdrawn) == ([{"late"}], [])
    parts.admission.refused.clear()
    parts.spares.seek(1)
    assert (parts.slots.avoided, parts.slots.withdrawn) == ([{"late"}, set()], [3])
    parts.slots.nodes[4] = "late"
    parts.spares.seek(1)
    assert parts.comes_up(4, "late") == [4]


def test_a_worker_that_ray_has_moved_to_a_node_without_a_report_starts_again_after_it(parts: Parts) -> None:
    parts.spares.vacate(1, "b")
    parts.spares.seek(1)
    parts.admission.unknown, parts.slots.nodes[1] = {"new"}, "new"
    assert parts.comes_up(1, "new") == []
    assert parts.slots.killed == [1, 1]
    parts.admission.unknown.clear()
    assert parts.fit() == []
    assert parts.comes_up(1, "new") == [1]


def test_spares_on_lost_and_draining_nodes_take_no_rank(parts: Parts) -> None:
    parts.spares.begin({0: info(0, "a"), 1: info(1, "b"), 2: info(2, "c")})
    parts.nodes.lost.add("b")
    parts.nodes.draining = ["c"]
    assert parts.fit() == [0]
    parts.spares.vacate_lost_nodes()
    assert set(parts.spares.infos) == {0, 2}
    assert parts.slots.killed == [1]


def test_what_is_no_longer_wanted_is_given_back(parts: Parts) -> None:
    """First what is not placed, then workers that start, then those that are ready, then what stays vacant."""
    parts.slots.nodes = {5: None, 6: None}
    parts.spares.begin({2: info(2)})
    parts.spares.refill(5)
    assert (list(parts.slots.started), parts.comes_up(3, "a")) == ([3, 4], [2, 3])
    parts.spares.refill(4)
    assert parts.slots.withdrawn == [6]
    parts.spares.refill(2)
    assert sorted(parts.slots.withdrawn) == [4, 5, 6]
    parts.spares.refill(0)
    assert parts.slots.withdrawn[3:] == [3]
    assert parts.fit() == [2], "reserved with the ranks, so that it could not be given back"
    parts.spares.vacate(3, "a")
    parts.spares.refill(0)
    assert parts.slots.withdrawn[4:] == [3]


def test_the_slot_on_a_draining_node_is_left(parts: Parts) -> None:
    parts.nodes.draining = ["c"]
    parts.slots.nodes[1] = "c"
    parts.spares.vacate(1, "c")
    parts.spares.seek(1)
    assert list(parts.slots.started) == [3]
    assert parts.slots.avoided == [{"c"}]
    parts.spares.refill(0)
    assert 3 in parts.slots.withdrawn
    parts.spares.vacate(4, "c")
    assert parts.slots.withdrawn[-1] == 4, "Ray would move the slot to another node, where nobody uses it"


def test_workers_that_must_share_a_node_are_not_sought_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch, one_node=True)
    parts.nodes.lost.add("b")
    parts.spares.vacate(1, "b")
    parts.spares.seek(1)
    assert list(parts.slots.started) == [1]


def test_a_slot_is_given_up_after_some_workers_have_died_there(parts: Parts) -> None:
    parts.spares.vacate(1, "a")
    for attempt in range(START_ATTEMPTS):
        assert parts.spares.num_given_up == 0, attempt
        parts.spares.seek(1)
        parts.slots.started[1].result = ray.exceptions.WorkerCrashedError()
        assert parts.fit() == []
    assert parts.spares.num_given_up == 1
    assert parts.slots.withdrawn == [1]
    assert "died while they started" in parts.warnings[0]


def test_a_slot_that_was_given_up_is_used_again_after_a_while(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    parts.spares.vacate(1, "a")
    for _ in range(START_ATTEMPTS):
        parts.spares.seek(1)
        parts.slots.started[1].result = ray.exceptions.WorkerCrashedError()
        parts.fit()
    parts.spares.retry()
    assert parts.spares.num_given_up == 1
    monkeypatch.setattr(spares, "RETRY_AFTER_S", 0.0)
    parts.spares.retry()
    assert parts.spares.num_given_up == 0
    parts.spares.seek(1)
    assert parts.comes_up(1, "a") == [1]


def test_a_replacement_that_cannot_use_its_gpu_keeps_its_slot_and_another_is_sought(
    parts: Parts, golden: Golden
) -> None:
    members = [info(0, gpu_uuid="GPU-0")]
    parts.spares.vacate(1, "a")
    parts.spares.seek(1)
    parts.slots.started[1].result = info(1, gpu_error="GPU 1: no kernel image is available")
    assert parts.fit(*members) == []
    golden.says(parts.warnings)
    parts.spares.seek(1)
    assert list(parts.slots.started) == [1, 3], "in the same slot it would be on the same GPU"
    parts.slots.started[3].result = info(3, gpu_uuid="GPU-2")
    assert parts.fit(*members) == [3]
    assert len(parts.warnings) == 1


def test_a_run_on_cpus_takes_a_replacement_that_cannot_use_its_gpu(parts: Parts) -> None:
    parts.spares.begin({1: info(1, gpu_error="GPU 1: no kernel image is available")})
    assert parts.fit(info(0)) == [1]
    assert not parts.warnings
