"""Which nodes a run avoids while they do not answer, with reports that need no Ray."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.files.golden import Golden
from orchestrator.driver.gang import spares
from orchestrator.driver.gang.members import HEARTBEATS_PER_ROUND, MOST_ROUNDS, in_turn
from orchestrator.driver.gang.spares import Admission
from orchestrator.driver.nodes.node_reports import driver_report
from orchestrator.driver.nodes.node_watch import NodeWatch
from orchestrator.planning.plan import Node
from orchestrator.records.run_dir import RunDir

NODE = Node(node_id="b", name="other", address="10.0.0.2", cpus=2.0, gpus=0)


def test_a_reservation_ends_when_a_node_that_was_late_has_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, golden: Golden
) -> None:
    answers: dict[Node, Any] = {}

    def reports_in_time(pending: dict[Any, Node], timeout_s: float) -> dict[Node, Any]:
        if answers:
            pending.clear()
        return answers

    monkeypatch.setattr(spares, "_living", lambda node_id: NODE)
    monkeypatch.setattr(spares, "ask_nodes", lambda nodes, **question: dict(enumerate(nodes)))
    monkeypatch.setattr(spares, "reports_in_time", reports_in_time)
    monkeypatch.setattr(spares, "check_sharing", lambda report, output_dir: ())
    warnings: list[str] = []
    spec: Any = SimpleNamespace(
        checked_nodes=(),
        config=SimpleNamespace(
            cluster=SimpleNamespace(exclude_nodes=(), rendezvous_timeout_s=0.0),
            modules=lambda with_job: {"job"},
            output_dir="",
        ),
        run_dir=RunDir(tmp_path),
        pickled_job=None,
    )
    monitor: Any = SimpleNamespace(warn=warnings.append)
    code: Any = None
    nodes = Admission(spec, code, NodeWatch(timeout_s=1.0), monitor)

    assert nodes.admits("b") is None
    assert nodes.admits("b") is False
    golden.says(warnings)
    avoided = frozenset(nodes.trouble())
    assert avoided == {"b"}
    assert not nodes.has_changed(avoided)

    answers[NODE] = driver_report()
    assert nodes.has_changed(avoided)
    assert nodes.admits("b") is True


# The rounds in which members are asked for heartbeats ---------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 64, 65, 1024, 5000, 16_384])
def test_every_rank_is_asked_within_few_rounds(world_size: int) -> None:
    first, asked, rounds = world_size // 3, set[int](), 0
    while len(asked) < world_size:
        of_round = in_turn(first, world_size)
        assert len(of_round) == len(set(of_round))
        asked.update(of_round)
        first, rounds = (of_round[-1] + 1) % world_size, rounds + 1
    assert rounds <= min(MOST_ROUNDS, -(-world_size // HEARTBEATS_PER_ROUND))
