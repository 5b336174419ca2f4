"""Which addresses the survivors of lost nodes are told, with a gang and nodes that need no Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.config.compose import compose
from orchestrator.driver.gang import Member
from orchestrator.driver.health import Health
from orchestrator.policy.outcomes import Outcomes
from orchestrator.protocol.messages import WorkerInfo
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies import registry


class FakeGang:
    """A rank on each of four nodes."""

    def __init__(self) -> None:
        self.failed_heartbeats: dict[int, Exception] = {}
        self.killed: list[int] = []
        infos = [WorkerInfo(node_id=n, node_ip=f"10.0.0.{i}", hostname=n, pid=1) for i, n in enumerate("abcd")]
        self.members = tuple(
            Member(global_rank=rank, actor=None, info=info, slot=rank) for rank, info in enumerate(infos)
        )

    def unanswered(self) -> set[int]:
        return set()

    def kill(self, rank: int) -> None:
        self.killed.append(rank)


def test_nodes_that_fall_silent_one_after_the_other_are_all_lost(tmp_path: Path) -> None:
    silent: set[str] = set()
    gang: Any = FakeGang()
    config, _ = compose(["strategy=ddp"], [], registry.config_class)
    nodes: Any = SimpleNamespace(silent=lambda workers, now: silent, lost=set())
    telemetry: Any = SimpleNamespace(last_step={}, straggler=None)
    plan: Any = SimpleNamespace(world_size=4)
    health = Health(
        1, gang, plan, config, RunDir(tmp_path),
        telemetry=telemetry, nodes=nodes, outcomes=Outcomes(world_size=4), earlier_hangs=(),
    )  # fmt: skip
    health.check({}, 0.0)
    assert health.unreachable() == ()
    silent.add("b")
    health.check({}, 1.0)
    assert health.unreachable() == ("10.0.0.1",)
    silent.add("d")
    health.check({}, 2.0)
    assert health.unreachable() == ("10.0.0.1", "10.0.0.3")
    assert gang.killed == [1], "the other rank is lost when the generation ends"
