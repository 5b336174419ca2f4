"""Hosts that are lost together are found together, with addresses that need no Ray."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from orchestrator.driver.nodes import node_watch
from orchestrator.driver.nodes.node_watch import NodeWatch


def test_hosts_that_do_not_answer_are_waited_for_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, all_asked = NodeWatch(3.0), threading.Barrier(3)
    watch._raylets = {name: (name, 1) for name in ("a", "b", "c", "not asked")}

    def connect(address: tuple[str, int], timeout: float) -> Any:
        all_asked.wait(10)  # breaks if one is asked after the other
        raise TimeoutError

    monkeypatch.setattr(node_watch.socket, "create_connection", connect)
    assert watch.find_gone(["a", "b", "unknown", "c"]) == ["a", "b", "c"]
