"""The gang: the resources and actors of a run, acquired and released together, replaced one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray

from orchestrator.driver.calls import GangError, all_answers, in_time
from orchestrator.driver.node_watch import NodeWatch
from orchestrator.driver.slots import Slots, Waiting, kill_process
from orchestrator.planning.plan import Plan
from orchestrator.policy.rank_order import rank_order, shards_last, shared_device
from orchestrator.protocol.messages import Heartbeat, WorkerEnvironment, WorkerInfo

SPARE_TIMEOUT_S = 1.0
"""A spare that does not answer at once is none."""


@dataclass(frozen=True)
class Member:
    """A worker in its place: its rank, its actor, and where that landed."""

    global_rank: int
    local_rank: int
    actor: Any
    info: WorkerInfo
    slot: int


class Gang:
    """All workers of a run. Use as a context manager: whatever happens, everything is released."""

    def __init__(self, plan: Plan, environment: WorkerEnvironment, nodes: NodeWatch, *, label: str):
        self._plan = plan
        self._nodes = nodes
        self._environment = environment
        self._config = environment.config.cluster
        self._label = label
        self._slots = Slots(plan, heartbeat_timeout_s=self._config.heartbeat_timeout_s, label=label)
        self._starting: dict[Any, int] = {}  # by the pending answer that a worker to be is up: its slot
        self._spares: dict[int, WorkerInfo] = {}  # by slot
        self._unprepared: set[int] = set()  # of the spares
        self._vacant: list[int] = []
        self._asked: dict[Any, int] = {}  # by the heartbeat to come: the rank
        self.members: tuple[Member, ...] = ()

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, *, on_wait: Callable[[float, str], None], poll: Callable[[], None]) -> None:
        """Reserve the resources, start the actors, and give each its rank.

        ``on_wait(seconds, holders)`` is called every few seconds while resources are taken;
        ``poll()`` more often, and may raise to give up.

        Raises:
            GangError: not in time, or two workers landed on one GPU.
        """
        bundles = self._plan.world_size + self._plan.spares
        waiting = self._waiting(f"{self._plan.world_size} workers", on_wait, poll)
        slots = self._slots.reserve_all(bundles, one_node=self._plan.one_node, waiting=waiting)
        up = [self._slots.start(slot) for slot in slots]
        timeout_s = self._config.rendezvous_timeout_s
        advice = "see Ray's logs, or raise cluster.rendezvous_timeout_s"
        try:
            places = cast("list[WorkerInfo]", all_answers(up, timeout_s, poll=poll, advice=advice))
        except ray.exceptions.RayError as e:
            raise GangError(f"a worker died while it started: {e}") from e
        _check_devices(places)
        order = rank_order(places)
        seated = shards_last(places, order[: self._plan.world_size], num_shards=self._plan.mesh.num_shards)
        self._assign_ranks([(slots[index], places[index]) for index in seated])
        self._spares = {slots[index]: places[index] for index in order[self._plan.world_size :]}
        self._unprepared = set(self._spares)

    def replace(
        self,
        ranks: Sequence[int],
        *,
        on_wait: Callable[[float, str], None],
        poll: Callable[[], None],
    ) -> None:
        """Give each of ``ranks`` another worker: a spare, or a new actor in the place of the old one; none of them on
        a node that is about to leave. Callbacks as in :meth:`acquire`.

        Raises:
            GangError: not in time, or each new one dies at once.
        """
        leaving = self._nodes.leaving
        seats = [(m.slot, m.info) for m in self.members]
        for rank in ranks:
            lost = self.members[rank]
            self._slots.kill(lost.slot)
            if spares := self._live_spares(near=lost.info.node_id):
                seats[rank] = spares[0], self._spares.pop(spares[0])
                self._vacate(lost, leaving)
            else:
                slot = self._slots.reserve() if lost.info.node_id in leaving else lost.slot
                waiting = self._waiting(f"a worker in the place of rank {rank}", on_wait, poll)
                seats[rank] = slot, self._slots.start_and_wait(slot, waiting)
        self._assign_ranks(seats)
        _check_devices([m.info for m in self.members])

    def reassign_ranks(self, plan: Plan, before: Sequence[int | None]) -> bool:
        """The workers of another plan: for each rank the one that a rank had before, or else a spare.

        False: some spares are gone by now, and nothing has changed.
        """
        spares = self._live_spares() if None in before else []
        if len(spares) < before.count(None):
            return False
        joining = iter(spares)
        slots = [next(joining) if rank is None else self.members[rank].slot for rank in before]
        places = {m.slot: m.info for m in self.members} | self._spares
        leaving = self._nodes.leaving
        for member in self.members:
            if member.global_rank not in before:
                self._slots.kill(member.slot)
                self._vacate(member, leaving)
        for slot in slots:
            self._spares.pop(slot, None)
        self._plan = plan
        self._assign_ranks([(slot, places[slot]) for slot in slots])
        _check_devices([m.info for m in self.members])
        return True

    def refill(self, workers: int) -> None:
        """Start workers in the background until there are ``workers`` with those in their places; first where lost
        ones were, then wherever the cluster has room, or will have it. They load what a worker needs, and so do the
        spares that there are.

        Not while the others wait to begin, for this takes their CPUs.
        """
        for slot in self._unprepared.intersection(self._spares):
            self._slots.actor(slot).prepare.remote(self._environment)
        self._unprepared = set()
        for _ in range(workers - len(self.members) - len(self._starting) - len(self._spares)):
            slot = self._vacant.pop() if self._vacant else self._slots.reserve()
            self._slots.start(slot)
            self._starting[self._slots.actor(slot).prepare.remote(self._environment)] = slot

    def ready(self) -> int:
        """How many workers could take a place at once."""
        starting = list(self._starting)
        for reference in ray.wait(starting, num_returns=len(starting), timeout=0)[0] if starting else ():
            slot = self._starting.pop(reference)
            try:
                self._spares[slot] = cast(WorkerInfo, ray.get(reference))
            except ray.exceptions.RayError:
                self._vacant.append(slot)
        leaving = self._nodes.leaving
        return sum(info.node_id not in leaving for info in self._spares.values())

    def release(self) -> None:
        """Kill the actors and give the resources back. Never raises."""
        self._slots.release()
        self.members = ()

    def heartbeats(self, *, with_system_metrics: bool, wait_s: float) -> dict[int, Heartbeat]:
        """What the workers have answered by now, by rank; ``wait_s`` is for the slower ones. The silent and dead are
        left out. An answer that comes later is part of the next one."""
        beats: dict[int, Heartbeat] = in_time(self._asked, 0.0)
        outstanding = set(self._asked.values())
        spoken_for: set[str] = set()
        for member in self.members:
            first_of_node = member.info.node_id not in spoken_for
            spoken_for.add(member.info.node_id)
            if member.global_rank not in outstanding:
                answer = member.actor.heartbeat.remote(with_system_metrics and first_of_node)
                self._asked[answer] = member.global_rank
        return beats | {rank: beat.after(beats.get(rank)) for rank, beat in in_time(self._asked, wait_s).items()}

    def ask(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Every worker's answer to a control call, by rank.

        Raises:
            GangError: not in time, or Ray is gone.
            RayError: a worker is gone.
        """
        return all_answers([getattr(m.actor, method).remote(*args) for m in self.members], timeout_s)

    def ask_one(self, rank: int, method: str, *args: Any, timeout_s: float) -> Any:
        """One worker's answer to a control call. Raises as :meth:`ask`."""
        return all_answers([getattr(self.members[rank].actor, method).remote(*args)], timeout_s)[0]

    def poll(self, method: str, *args: Any, ranks: Collection[int] | None = None, timeout_s: float) -> dict[int, Any]:
        """The answers to a control call of those workers that give one in time, by rank."""
        asked = {
            getattr(m.actor, method).remote(*args): m.global_rank
            for m in self.members
            if ranks is None or m.global_rank in ranks
        }
        return in_time(asked, timeout_s)

    def tell(self, method: str, *args: Any, ranks: Collection[int]) -> None:
        """A control call to some workers whose answer nobody waits for."""
        for member in self.members:
            if member.global_rank in ranks:
                getattr(member.actor, method).remote(*args)

    def kill(self, rank: int) -> None:
        """End the process of a rank on its own node, at once: a stopped one outlives Ray's own way for seconds."""
        member = self.members[rank]
        kill_process(member.info)
        self._slots.kill(member.slot)

    def _waiting(self, what: str, on_wait: Callable[[float, str], None], poll: Callable[[], None]) -> Waiting:
        return Waiting(what, self._label, self._config.pending_timeout_s, on_wait, poll)

    def _vacate(self, lost: Member, leaving: Collection[str]) -> None:
        if lost.info.node_id not in leaving:
            self._vacant.append(lost.slot)

    def _live_spares(self, *, near: str = "") -> list[int]:
        """The slots of the spares that answer and may stay where they are, those on the node ``near`` first."""
        self.ready()
        asked = {self._slots.actor(slot).worker_info.remote(): slot for slot in self._spares}
        alive = in_time(asked, SPARE_TIMEOUT_S)
        for slot in set(self._spares).difference(alive):
            self._slots.kill(slot)
            del self._spares[slot]
            self._vacant.append(slot)
        leaving = self._nodes.leaving
        staying = [slot for slot, info in self._spares.items() if info.node_id not in leaving]
        return sorted(staying, key=lambda slot: (self._spares[slot].node_id != near, slot))

    def _assign_ranks(self, seats: Sequence[tuple[int, WorkerInfo]]) -> None:
        """Give the workers in these slots their ranks, in order."""
        members: list[Member] = []
        on_node: dict[str, int] = {}
        for rank, (slot, info) in enumerate(seats):
            local_rank = on_node.setdefault(info.node_id, 0)
            on_node[info.node_id] += 1
            actor = self._slots.actor(slot)
            members.append(Member(global_rank=rank, local_rank=local_rank, actor=actor, info=info, slot=slot))
        self.members = tuple(members)
        self._asked = {}  # of other ranks, or of before


def _check_devices(places: Sequence[WorkerInfo]) -> None:
    if error := shared_device(places):
        raise GangError(error)
