"""The driver of a run whose workers need no Ray: what it has at hand, and a gang for which the test answers."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from helpers.machines.plans import LAPTOP, config_of, plan_of
from helpers.records.recorder import Recorder
from orchestrator.config.redact import Redactor
from orchestrator.driver.gang.members import Member, Members
from orchestrator.driver.process.run_context import EventStream, RunContext, RunSpec
from orchestrator.driver.process.signals import StopSignals
from orchestrator.policy.elastic import Sizes
from orchestrator.protocol.messages import Heartbeat, WorkerInfo
from orchestrator.records.lease import Lease
from orchestrator.records.run_dir import RunDir


class Gang(Members):
    """Workers on these nodes, whose next heartbeats are in ``answers``; those in ``silent`` do not answer."""

    def __init__(self, nodes: str, pids: Sequence[int] | None = None) -> None:
        super().__init__()
        pids = [1] * len(nodes) if pids is None else pids
        infos = [
            WorkerInfo(node_id=node, node_ip=f"10.0.0.{i}", hostname=node, pid=pid)
            for i, (node, pid) in enumerate(zip(nodes, pids, strict=True))
        ]
        self.members = tuple(Member(rank, None, info, rank) for rank, info in enumerate(infos))
        self.answers: dict[int, Heartbeat] = {}
        self.silent: set[int] = set()
        self.killed: list[int] = []

    def heartbeats(self, **_: Any) -> dict[int, Heartbeat]:
        return self.answers

    def unanswered(self) -> set[int]:
        return self.silent

    def kill(self, rank: int) -> None:
        self.killed.append(rank)


class Driver:
    """What the parts of a driver need: ``context``, with the events in ``recorder``, and ``workers`` with a gang."""

    def __init__(self, folder: Path, nodes: str = "ab", *, started_at: float = 0.0) -> None:
        words = ("strategy=ddp", f"strategy.num_workers={len(nodes)}", "train.global_batch_size=8", "tracking=none")
        self.plan, self.run_dir, self.recorder = plan_of(LAPTOP, *words, embedded=True), RunDir(folder), Recorder()
        spec = RunSpec(
            config=config_of(*words), sizes=Sizes.of(self.plan), run_dir=self.run_dir, run_uid="r", checkpoint=None,
            resumed_from_step=None, started_at=started_at, tokens_per_sample=None,
        )  # fmt: skip
        events = EventStream([self.recorder], Redactor())
        self.context = RunContext(spec=spec, events=events, stop=StopSignals(), lease=Lease(self.run_dir))
        self.gang = Gang(nodes)
        self.workers: Any = SimpleNamespace(gang=self.gang, plan=self.plan, waits_s={"queue_s": 0.0, "waited_s": 0.0})
