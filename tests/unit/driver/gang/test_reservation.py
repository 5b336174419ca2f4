"""The size that an elastic run asks for while it waits for room, with slots that need no Ray."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.cases import Case, config_of, plan_of
from helpers.quick_jobs import digits
from orchestrator.driver.gang import gang as gang_module
from orchestrator.driver.gang.gang import Gang
from orchestrator.policy.elastic import Sizes

PLANS = {n: plan_of(config_of(Case(job=digits()), n)) for n in (1, 2, 3)}
SIZES = Sizes([PLANS[n].mesh for n in (1, 2, 3)], lambda mesh: PLANS[mesh.world_size], initial=PLANS[3].mesh)


class Waiting:
    """A gang whose next reservations end as ``ends`` says: placed, given up for another reason, or given up late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: str, room: int) -> None:
        self.asked: list[int] = []
        self.now = 0.0
        self._ends = list(ends)
        monkeypatch.setattr(gang_module, "room", lambda *_: room)
        monkeypatch.setattr(gang_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        wait = SimpleNamespace(waited_s=0.0, state=lambda: None)
        self.gang: Any = SimpleNamespace(
            _plan=PLANS[3],
            waited_s=0.0,
            _config=SimpleNamespace(unfit_timeout_s=None),
            _admission=SimpleNamespace(
                trouble=dict, has_changed=lambda _: self._has_changed, admits_all=lambda _: True
            ),
            _slots=SimpleNamespace(reserve_all=self._reserve_all),
            _wait_for=lambda *_, **__: wait,
            _request=lambda _: None,
            _monitor=SimpleNamespace(offer_turn=lambda: None),
        )
        self.gang._gives_up = partial(Gang._gives_up, self.gang)

    def _reserve_all(self, count: int, *, gives_up: Callable[[], bool], **_: Any) -> dict[int, str] | None:
        self.asked.append(count)
        self._has_changed = (end := self._ends.pop(0)) == "nodes"
        if end == "placed":
            return dict.fromkeys(range(count), "a")
        self.now += gang_module.PLACEMENT_PATIENCE_S + 1 if end == "late" else 0.0
        assert gives_up()
        return None

    def reserve(self) -> list[int]:
        Gang._reserve(self.gang, SIZES)
        return self.asked


def test_a_node_that_starts_to_drain_does_not_make_a_run_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Waiting(monkeypatch, "nodes", "placed", room=2).reserve() == [3, 3]


def test_a_wait_in_vain_makes_a_run_smaller_and_a_node_that_answers_makes_it_larger_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Waiting(monkeypatch, "late", "placed", room=2).reserve() == [3, 2]
    assert Waiting(monkeypatch, "late", "nodes", "placed", room=3).reserve() == [3, 3, 3]


def test_a_run_that_has_lost_its_turn_asks_for_its_initial_size_first(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch, "placed", room=2)
    waiting.gang._plan = PLANS[1]
    assert waiting.reserve() == [3]
