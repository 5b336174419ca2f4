"""A gang of simulated workers under the real driver: two Ray actors answer for all ranks, which train by the clock."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

import orchestrator.driver.gang.gang
from orchestrator.config.compose import compose
from orchestrator.config.redact import Redactor
from orchestrator.driver.code.worker_code import WorkerCode
from orchestrator.driver.gang.slots import Slots
from orchestrator.driver.process.run_context import EventStream, RunContext, RunSpec
from orchestrator.driver.process.signals import StopSignals
from orchestrator.driver.process.waiting import ResourceWait
from orchestrator.driver.reporting import RecordUpload
from orchestrator.driver.run.run import Run
from orchestrator.features.tracking.uploader import RunUploader
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.policy.elastic import Sizes
from orchestrator.protocol.core_metrics import SAMPLES_SEEN
from orchestrator.protocol.events import Event, FirstStepDone, Recovered
from orchestrator.protocol.messages import (
    ANY_RANK,
    Assignment,
    Failure,
    Heartbeat,
    Outcome,
    Stacks,
    TrainPoint,
    WorkerInfo,
)
from orchestrator.records import run_dir as run_dirs
from orchestrator.records.journal import Journal
from orchestrator.records.lease import Lease
from orchestrator.records.lock import this_process
from orchestrator.strategies import registry

HOSTS = 2
STEP_S = 0.2
NO_PROCESS = 1 << 22
"""Linux has no process ids from this number on."""
LOG_EVERY = 10


@contextmanager
def simulated_gangs() -> Iterator[None]:
    """Let every gang of this process consist of simulated workers."""
    orchestrator.driver.gang.gang.Slots = SimulatedSlots  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        orchestrator.driver.gang.gang.Slots = Slots  # type: ignore[misc]


@dataclass
class SimulatedRank:
    """The state of a rank.

    Attributes:
        step_s: how long its steps take.
        leaving: it has received SIGTERM.
        deaf: it does not answer ``hold``.
        num_failing: how many of its next heartbeats raise.
        has_port: it can open the store of a generation.
        resumed_at: the step and time from which it trains; None while it does not.
    """

    number: int
    step_s: float
    generation: int = 0
    leaving: bool = False
    deaf: bool = False
    num_failing: float = 0
    has_port: bool = True
    held: bool = False
    stops_after: int | None = None
    resumed_at: tuple[int, float] | None = None
    reported: int = 0
    first_step_reported: bool = True
    ended: asyncio.Event | None = None

    @property
    def step(self) -> int:
        if self.resumed_at is None:
            return 0
        step, since = self.resumed_at
        return step + int((time.monotonic() - since) / self.step_s)


@ray.remote(max_concurrency=100_000)
class Host:
    """Answers for many ranks, by the number of their worker, whose steps take ``step_s``."""

    def __init__(self, step_s: float) -> None:
        self.ranks: dict[int, SimulatedRank] = {}
        self.heartbeats = 0
        self._step_s = step_s
        self.finished = False
        self.max_workers: int | None = None
        self._unpacked: tuple[bytes, Assignment] | None = None

    async def call(self, worker: int, method: str, *args: Any) -> Any:
        if (rank := self.ranks.get(worker)) is None:
            rank = self.ranks[worker] = SimulatedRank(number=worker, step_s=self._step_s)
        return await getattr(self, method)(rank, *args)

    async def change(self, worker: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self.ranks[worker], name, value)

    async def cpu_s(self) -> float:
        """Return the CPU time of this process so far."""
        return time.process_time()

    async def num_heartbeats(self) -> int:
        return self.heartbeats

    async def num_held(self) -> int:
        return sum(rank.held for rank in self.ranks.values())

    async def finish_all(self, at_once: bool = True) -> None:
        """Let all ranks complete the training: ``at_once``, or where they would pause."""
        self.finished = True
        for rank in self.ranks.values():
            if rank.ended is not None and at_once:
                rank.ended.set()

    async def worker_info(self, rank: SimulatedRank) -> WorkerInfo:
        node_id = ray.get_runtime_context().get_node_id()
        pid = NO_PROCESS + rank.number  # the driver may kill it
        return WorkerInfo(node_id=node_id, node_ip="127.0.0.1", hostname="simulated", pid=pid)

    async def limit_workers(self, count: int) -> None:
        """Let every worker but the first ``count`` die as it starts."""
        self.max_workers = count

    async def prepare(self, rank: SimulatedRank, _: Any) -> WorkerInfo:
        if self.max_workers is not None and rank.number >= self.max_workers:
            raise RuntimeError("no start")
        return await self.worker_info(rank)

    async def open_store(self, rank: SimulatedRank, *_: Any) -> tuple[str, int]:
        if not rank.has_port:
            raise OSError("no port is free")
        return "127.0.0.1", 1

    async def train(self, rank: SimulatedRank, packed: bytes, _: int) -> Outcome:
        assignment = self._unpack(packed)
        rank.generation, rank.ended, rank.first_step_reported = assignment.generation, asyncio.Event(), False
        step = assignment.source_step if assignment.sources is not None else 0
        rank.resumed_at, rank.reported = (step, time.monotonic()), step
        rank.held, rank.stops_after = False, None
        if not self.finished:
            await rank.ended.wait()
        step = rank.step
        rank.resumed_at = (step, float("inf"))
        if self.finished:
            return Outcome(status="done", step=step, last_heartbeat=self._heartbeat(rank))
        if (last := rank.stops_after) is not None:
            return Outcome(
                status="stopped",
                step=last,
                recoverable_steps={ANY_RANK: (last,)},
                last_heartbeat=self._heartbeat(rank),
            )
        failure = Failure(
            message="Connection closed by peer", traceback="", time=time.time(), collateral=True, log_tail=""
        )
        return Outcome(
            status="failed",
            step=step,
            failure=failure,
            recoverable_steps={ANY_RANK: (step,)},
            last_heartbeat=self._heartbeat(rank),
        )

    def _unpack(self, packed: bytes) -> Assignment:
        """Unpack an assignment once for all ranks, which do it in parallel in a real gang."""
        if self._unpacked is None or self._unpacked[0] != packed:
            self._unpacked = packed, Assignment.unpacked(packed, global_rank=0)
        return self._unpacked[1]

    async def heartbeat(self, rank: SimulatedRank, _: bool) -> Heartbeat:
        if rank.num_failing > 0:
            rank.num_failing -= 1
            raise RuntimeError("no heartbeat")
        self.heartbeats += 1
        return self._heartbeat(rank)

    def _heartbeat(self, rank: SimulatedRank) -> Heartbeat:
        step = rank.step if rank.resumed_at is None or rank.resumed_at[1] < float("inf") else rank.reported
        events: tuple[Event, ...] = ()
        if not rank.first_step_reported and rank.resumed_at is not None and step > rank.resumed_at[0]:
            rank.first_step_reported = True
            events = (FirstStepDone(generation=rank.generation, startup={"first_step_s": rank.step_s}),)
        points = tuple(
            TrainPoint(
                step=s,
                time=time.time(),
                loss_sum=1.0,
                weight=1.0,
                step_ms=(rank.step_s * 1e3,) * LOG_EVERY,
                data_wait_ms=0.1,
                comm_share=0.1,
                peak_memory_mb=100.0,
                metrics={SAMPLES_SEEN.name: SAMPLES_SEEN.of(s)},
            )
            for s in range(rank.reported + 1, step + 1)
            if s % LOG_EVERY == 0
        )
        rank.reported = step
        return Heartbeat(
            step=step,
            phase="train",
            ticks=step,
            usual_tick_s=rank.step_s,
            busy_ms=0.9e3 * rank.step_s,
            points=points,
            events=events,
            leaving=rank.leaving,
        )

    async def abandon(self, rank: SimulatedRank, *_: Any) -> None:
        if rank.ended is not None:
            rank.ended.set()

    async def hold(self, rank: SimulatedRank, _: int) -> int:
        if rank.deaf:
            await asyncio.Event().wait()
        rank.held = True
        return rank.step

    async def finish_step(self, rank: SimulatedRank, _: int, step: int, save: bool) -> None:
        rank.stops_after = step
        if rank.ended is not None:
            rank.ended.set()

    async def open_gate(self, rank: SimulatedRank, _: int) -> None:
        rank.held = False

    async def finish(self, rank: SimulatedRank, *_: Any) -> None:
        pass

    async def stacks(self, rank: SimulatedRank) -> Stacks:
        return Stacks(text="", waiting=True)


class SimulatedWorker:
    """Looks like a handle of the actor ``Worker`` to the driver."""

    def __init__(self, host: Any, number: int):
        self._number = number
        self._call_host = host.call
        self._call_host_unrecorded = host.call.options(enable_task_events=False)
        self.training: Any = None

    def __getattr__(self, method: str) -> Any:
        return _Method(partial(self._call, method))

    def _call(self, method: str, *args: Any) -> Any:
        call = self._call_host_unrecorded if method == "heartbeat" else self._call_host
        reference = call.remote(self._number, method, *args)
        if method == "train":
            self.training = reference
        return reference

    def die(self) -> None:
        """End the pending call of ``train`` as the death of a process does."""
        if self.training is not None:
            ray.cancel(self.training)


@dataclass(frozen=True)
class _Method:
    remote: Any

    def options(self, **_: Any) -> _Method:
        return self


class SimulatedSlots:
    """Looks like ``driver.slots.Slots`` to the gang."""

    step_s: float = STEP_S
    hosts: list[Any]
    workers: dict[int, SimulatedWorker]  # by slot
    num_started: int

    def __init__(self, plan: Plan, code: WorkerCode, **_: Any):
        type(self).hosts = [Host.remote(self.step_s) for _ in range(HOSTS)]  # type: ignore[attr-defined]
        type(self).workers = {}
        type(self).num_started = 0
        self.resources = {"CPU": plan.cpus_per_worker}
        self._num_reserved = 0

    def reserve_all(
        self,
        count: int,
        *,
        one_node: bool,
        avoid: Collection[str],
        wait: ResourceWait,
        gives_up: Callable[[], bool],
    ) -> dict[int, str]:
        self._num_reserved = count
        return self.placed(range(count))

    def placed(self, slots: Iterable[int]) -> dict[int, str]:
        return dict.fromkeys(slots, ray.get_runtime_context().get_node_id())

    def reserve(self, *, avoid: Collection[str]) -> int:
        self._num_reserved += 1
        return self._num_reserved - 1

    def num_by_node(self) -> Mapping[str, int]:
        return {}

    def is_alone(self, slot: int) -> bool:
        return False

    def withdraw(self, slot: int) -> bool:
        self.kill(slot)
        return False

    def start(self, slot: int) -> Any:
        self.workers[slot] = SimulatedWorker(self.hosts[self.num_started % HOSTS], self.num_started)
        type(self).num_started += 1
        return self.workers[slot].worker_info.remote()

    def actor(self, slot: int) -> SimulatedWorker:
        return self.workers[slot]

    def kill(self, slot: int) -> None:
        self.workers[slot].die()

    def release(self) -> None:
        for host in self.hosts:
            ray.kill(host)


def change(workers: Iterable[int], **values: Any) -> None:
    """Set attributes of the simulated ranks of ``workers``."""
    ray.get([SimulatedSlots.hosts[worker % HOSTS].change.remote(worker, values) for worker in workers])


class Watcher:
    """A sink that tells when the first step and a recovery have happened, and keeps all events.

    Attributes:
        seen_at: when the last event of each kind came.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.seen_at: dict[type[Event], float] = {}
        self.first_step = threading.Event()
        self.recovered: list[Recovered] = []
        self.healed = threading.Event()

    def emit(self, event: Event) -> None:
        self.events.append(event)
        self.seen_at[type(event)] = time.monotonic()
        if isinstance(event, FirstStepDone):
            self.first_step.set()
        if isinstance(event, Recovered):
            self.recovered.append(event)
            self.healed.set()

    def close(self) -> None:
        pass


def prepared_run(world_size: int, folder: Path, *words: str) -> tuple[Run, Watcher]:
    """Return a run of ``world_size`` ranks; ``words``: further overrides."""
    errors: list[str] = []
    overrides = [
        "job=toy",
        "strategy=ddp",
        f"strategy.num_workers={world_size}",
        f"train.global_batch_size={world_size}",
        "train.steps=1000000",
        f"train.log_every={LOG_EVERY}",
        "tracking=none",
        "cluster.device=cpu",
        f"output_dir={folder}",
        *words,
    ]
    config, _ = compose(overrides, errors, registry.config_class)
    assert config is not None, errors
    node = Node(node_id="", name="simulated", cpus=float(world_size), gpus=0)
    plan = make_plan(config, registry.load("ddp"), (node,), oversubscribe_cpus=True)
    run_dir = run_dirs.create(folder, "scale")
    run_dir.update_record(state="running", driver=this_process())
    spec = RunSpec(
        config=config,
        sizes=Sizes.of(plan),
        run_dir=run_dir,
        run_uid="simulated",
        checkpoint=None,
        resumed_from_step=None,
        started_at=time.time(),
        tokens_per_sample=None,
    )
    watcher = Watcher()
    events = EventStream([watcher], Redactor(), journal=Journal(run_dir))
    uploader = RunUploader.start(run_dir, replace(config.tracking, uri=None))
    lease = Lease(run_dir)
    records = RecordUpload(run_dir, lease, config.storage, Redactor())
    code = WorkerCode(working_dir=None, py_modules=(), pip=())
    context = RunContext(spec=spec, events=events, stop=StopSignals(), lease=lease)
    return Run(context, code, uploader, records), watcher
