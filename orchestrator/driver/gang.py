"""The gang: the resources and actors of a run, acquired and released together, replaced one by one."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from orchestrator.config.schema import ClusterConfig
from orchestrator.driver import cluster
from orchestrator.driver.node_watch import NodeWatch
from orchestrator.messages import Heartbeat, Whereabouts
from orchestrator.plan import Plan
from orchestrator.worker.actor import remote_worker

WAITING_MESSAGE_EVERY_S = 5.0
RELEASE_TIMEOUT_S = 5.0
SPARE_TIMEOUT_S = 1.0
"""A spare that does not answer at once is none."""
STARTS_TRIED = 3

K = TypeVar("K", bound=Hashable)


class GangError(RuntimeError):
    """The workers could not be brought together; the text says why and what to do."""


@dataclass(frozen=True)
class Member:
    """A worker in its place: its rank, its actor, and where that landed."""

    global_rank: int
    local_rank: int
    actor: Any
    where: Whereabouts
    slot: int


class Gang:
    """All workers of a run. Use as a context manager: whatever happens, everything is released."""

    def __init__(self, plan: Plan, config: ClusterConfig, nodes: NodeWatch, *, label: str):
        self._plan = plan
        self._nodes = nodes
        self._config = config
        self._label = label
        self._slots: list[tuple[PlacementGroup, int]] = []  # a bundle each
        self._actors: dict[int, Any] = {}  # by slot
        self._started = 0
        self._starting: dict[Any, int] = {}  # by the pending answer that a worker to be is up: its slot
        self._spares: dict[int, Whereabouts] = {}  # by slot
        self._vacant: list[int] = []
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
        strategy = "STRICT_PACK" if self._plan.one_node else "PACK"
        group = self._reserve(bundles, strategy)
        waiting = self._waiting(f"{self._plan.world_size} workers", on_wait, poll)
        while not group.wait(timeout_seconds=0.5):
            waiting.go_on()
        # Ray promises no order of its own: those of a node together.
        nodes = placement_group_table(group)["bundles_to_node_id"]
        slots = sorted(nodes, key=lambda bundle: (nodes[bundle], bundle))
        for slot in slots:
            self._start(slot)
        try:
            places = self._whereabouts(slots, self._config.rendezvous_timeout_s, poll)
        except ray.exceptions.RayError as e:
            raise GangError(f"a worker died while it started: {e}") from e
        check_devices(places)
        order = rank_order(places)
        seated = shards_last(places, order[: self._plan.world_size], num_shards=self._plan.mesh.num_shards)
        self._seat([(slots[index], places[index]) for index in seated])
        self._spares = {slots[index]: places[index] for index in order[self._plan.world_size :]}

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
        seats = [(m.slot, m.where) for m in self.members]
        for rank in ranks:
            lost = self.members[rank]
            self._kill(lost.slot)
            if spares := self._live_spares(near=lost.where.node_id):
                seats[rank] = spares[0], self._spares.pop(spares[0])
                self._vacate(lost, leaving)
            else:
                slot = self._new_slot() if lost.where.node_id in leaving else lost.slot
                waiting = self._waiting(f"a worker in the place of rank {rank}", on_wait, poll)
                seats[rank] = slot, self._start_and_wait(slot, waiting)
        self._seat(seats)
        check_devices([m.where for m in self.members])

    def reseat(self, plan: Plan, before: Sequence[int | None]) -> bool:
        """The workers of another plan: for each rank the one that a rank had before, or else a spare.

        False: some spares are gone by now, and nothing has changed.
        """
        spares = self._live_spares() if None in before else []
        if len(spares) < before.count(None):
            return False
        joining = iter(spares)
        slots = [next(joining) if rank is None else self.members[rank].slot for rank in before]
        places = {m.slot: m.where for m in self.members} | self._spares
        leaving = self._nodes.leaving
        for member in self.members:
            if member.global_rank not in before:
                self._kill(member.slot)
                self._vacate(member, leaving)
        for slot in slots:
            self._spares.pop(slot, None)
        self._plan = plan
        self._seat([(slot, places[slot]) for slot in slots])
        check_devices([m.where for m in self.members])
        return True

    def refill(self, workers: int) -> None:
        """Start workers in the background until there are ``workers`` with those in their places; first where lost
        ones were, then wherever the cluster has room, or will have it.

        Not while the others wait to begin, for starting takes their CPUs.
        """
        for _ in range(workers - len(self.members) - len(self._starting) - len(self._spares)):
            slot = self._vacant.pop() if self._vacant else self._new_slot()
            self._starting[self._start(slot)] = slot

    def ready(self) -> int:
        """How many workers could take a place at once."""
        starting = list(self._starting)
        for reference in ray.wait(starting, num_returns=len(starting), timeout=0)[0] if starting else ():
            slot = self._starting.pop(reference)
            try:
                self._spares[slot] = cast(Whereabouts, ray.get(reference))
            except ray.exceptions.RayError:
                self._vacant.append(slot)
        leaving = self._nodes.leaving
        return sum(where.node_id not in leaving for where in self._spares.values())

    def release(self) -> None:
        """Kill the actors and give the resources back. Never raises."""
        with contextlib.suppress(Exception):
            for actor in self._actors.values():
                ray.kill(actor)
        # Where Ray is dead, this call would wait a minute for it.
        groups = {group.id: group for group, _ in self._slots}
        thread = threading.Thread(target=_remove, args=(list(groups.values()),), daemon=True)
        thread.start()
        thread.join(RELEASE_TIMEOUT_S)
        self._actors, self._slots, self.members = {}, [], ()

    def heartbeats(self, *, with_system_metrics: bool) -> dict[int, Heartbeat]:
        """What the workers answer within a heartbeat's time, by rank; the silent and dead left out."""
        spoken_for: set[str] = set()
        asked: dict[Any, int] = {}
        for member in self.members:
            first_of_node = member.where.node_id not in spoken_for
            spoken_for.add(member.where.node_id)
            asked[member.actor.heartbeat.remote(with_system_metrics and first_of_node)] = member.global_rank
        return cast("dict[int, Heartbeat]", _in_time(asked, max(1.0, self._config.heartbeat_s)))

    def ask(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Every worker's answer to a control call, by rank.

        Raises:
            GangError: not in time, or Ray is gone.
            RayError: a worker is gone.
        """
        return self._all([getattr(m.actor, method).remote(*args) for m in self.members], timeout_s)

    def ask_one(self, rank: int, method: str, *args: Any, timeout_s: float) -> Any:
        """One worker's answer to a control call. Raises as :meth:`ask`."""
        return self._all([getattr(self.members[rank].actor, method).remote(*args)], timeout_s)[0]

    def poll(self, method: str, *args: Any, ranks: Collection[int] | None = None, timeout_s: float) -> dict[int, Any]:
        """The answers to a control call of those workers that give one in time, by rank."""
        asked = {
            getattr(m.actor, method).remote(*args): m.global_rank
            for m in self.members
            if ranks is None or m.global_rank in ranks
        }
        return _in_time(asked, timeout_s)

    def tell(self, method: str, *args: Any, ranks: Collection[int]) -> None:
        """A control call to some workers whose answer nobody waits for."""
        for member in self.members:
            if member.global_rank in ranks:
                getattr(member.actor, method).remote(*args)

    def kill(self, rank: int) -> None:
        """End the process of a rank on its own node, at once: a stopped one outlives Ray's own way for seconds."""
        member = self.members[rank]
        if member.where.node_id == ray.get_runtime_context().get_node_id():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.where.pid, signal.SIGKILL)
        else:
            here = NodeAffinitySchedulingStrategy(member.where.node_id, soft=False)
            _kill_process.options(scheduling_strategy=here).remote(member.where.pid)
        self._kill(member.slot)

    def _all(self, references: list[Any], timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        waiting = references
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.5)
            check_ray()
            if waiting and time.monotonic() > deadline:
                raise GangError(f"{len(waiting)} of {len(references)} workers did not answer within {timeout_s:g} s")
        return ray.get(references)

    def _reserve(self, bundles: int, strategy: str) -> PlacementGroup:
        """Ask for room for so many workers, which has a slot for each."""
        bundle: dict[str, float] = {"CPU": self._plan.cpus_per_worker}
        if self._plan.gpus_per_worker:
            bundle["GPU"] = self._plan.gpus_per_worker
        asked, name = [dict(bundle) for _ in range(bundles)], f"{self._label}/{len(self._slots)}"
        group: PlacementGroup = placement_group(asked, strategy=strategy, name=name)
        self._slots += [(group, index) for index in range(bundles)]
        return group

    def _waiting(self, what: str, on_wait: Callable[[float, str], None], poll: Callable[[], None]) -> _Waiting:
        return _Waiting(what, self._label, self._config.pending_timeout_s, on_wait, poll)

    def _new_slot(self) -> int:
        self._reserve(1, "PACK")
        return len(self._slots) - 1

    def _start(self, slot: int) -> Any:
        """Start an actor; returns its answer to come, once it is up."""
        name = f"{self._label}/worker-{self._started}"
        self._started += 1
        group, bundle = self._slots[slot]
        actor = (
            remote_worker()
            .options(
                name=name,
                num_cpus=self._plan.cpus_per_worker,
                num_gpus=self._plan.gpus_per_worker,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            )
            .remote(name, heartbeat_timeout_s=self._config.heartbeat_timeout_s)
        )
        self._actors[slot] = actor
        return actor.whereabouts.remote()

    def _vacate(self, lost: Member, leaving: Collection[str]) -> None:
        if lost.where.node_id not in leaving:
            self._vacant.append(lost.slot)

    def _start_and_wait(self, slot: int, waiting: _Waiting) -> Whereabouts:
        """Where a new actor landed.

        Raises:
            GangError: not in time, or each one dies at once.
        """
        for _ in range(STARTS_TRIED):
            up = self._start(slot)
            while not ray.wait([up], timeout=0.2)[0]:
                check_ray()
                waiting.go_on()
            with contextlib.suppress(ray.exceptions.RayError):
                return cast(Whereabouts, ray.get(up))
        raise GangError(f"{STARTS_TRIED} workers died one after another while they started; see Ray's logs")

    def _kill(self, slot: int) -> None:
        with contextlib.suppress(Exception):
            ray.kill(self._actors[slot])

    def _live_spares(self, *, near: str = "") -> list[int]:
        """The slots of the spares that answer and may stay where they are, those on the node ``near`` first."""
        self.ready()
        asked = {self._actors[slot].whereabouts.remote(): slot for slot in self._spares}
        alive = _in_time(asked, SPARE_TIMEOUT_S)
        for slot in set(self._spares).difference(alive):
            self._kill(slot)
            del self._spares[slot]
            self._vacant.append(slot)
        leaving = self._nodes.leaving
        staying = [slot for slot, where in self._spares.items() if where.node_id not in leaving]
        return sorted(staying, key=lambda slot: (self._spares[slot].node_id != near, slot))

    def _seat(self, seats: Sequence[tuple[int, Whereabouts]]) -> None:
        """Give the workers in these slots their ranks, in order."""
        members: list[Member] = []
        on_node: dict[str, int] = {}
        for rank, (slot, where) in enumerate(seats):
            local_rank = on_node.setdefault(where.node_id, 0)
            on_node[where.node_id] += 1
            actor = self._actors[slot]
            members.append(Member(global_rank=rank, local_rank=local_rank, actor=actor, where=where, slot=slot))
        self.members = tuple(members)

    def _whereabouts(self, slots: Sequence[int], timeout_s: float, poll: Callable[[], None]) -> list[Whereabouts]:
        """Where the actors of these slots landed, once they are up.

        Raises:
            GangError: one is not, in time.
            RayError: one died.
        """
        references = [self._actors[slot].whereabouts.remote() for slot in slots]
        deadline = time.monotonic() + timeout_s
        waiting = list(references)
        while waiting:
            poll()
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.5)
            check_ray()
            if waiting and time.monotonic() > deadline:
                raise GangError(
                    f"{len(waiting)} of {len(references)} workers did not start within {timeout_s:g} s; see Ray's "
                    "logs, or raise cluster.rendezvous_timeout_s"
                )
        return cast("list[Whereabouts]", ray.get(references))


class _Waiting:
    """For resources for ``what``, with a word now and then, and not for ever."""

    def __init__(
        self, what: str, label: str, timeout_s: float, on_wait: Callable[[float, str], None], poll: Callable[[], None]
    ):
        self._what = what
        self._label = label
        self._timeout_s = timeout_s
        self._on_wait = on_wait
        self._poll = poll
        self._began = self._said = time.monotonic()

    def go_on(self) -> None:
        """To be called several times a second.

        Raises:
            GangError: for long enough.
        """
        self._poll()
        now = time.monotonic()
        if now - self._began > self._timeout_s:
            raise GangError(
                f"no room for {self._what} within {now - self._began:.0f} s (held by {_holders(self._label)}); free "
                "some, lower strategy.num_workers, or raise cluster.pending_timeout_s"
            )
        if now - self._said > WAITING_MESSAGE_EVERY_S:
            self._said = now
            self._on_wait(now - self._began, _holders(self._label))


def _holders(label: str) -> str:
    """The placement groups of others that hold resources."""
    others = [
        f"{group['name'] or 'unnamed'} ({len(group['bundles'])} bundles)"
        for group in placement_group_table().values()
        if group["state"] == "CREATED" and not group["name"].startswith(f"{label}/")
    ]
    return ", ".join(others) or "other Ray tasks"


def _in_time(asked: Mapping[Any, K], timeout_s: float) -> dict[K, Any]:
    """What each pending answer becomes within this time, under its key; those that fail or do not come left out."""
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    answers: dict[K, Any] = {}
    for reference in ready:
        with contextlib.suppress(ray.exceptions.RayError):
            answers[asked[reference]] = ray.get(reference)
    return answers


@ray.remote(num_cpus=0, max_retries=0)
def _kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _remove(groups: Sequence[PlacementGroup]) -> None:
    with contextlib.suppress(Exception):
        for group in groups:
            remove_placement_group(group)


def check_ray() -> None:
    """Nothing that is asked of a dead Ray would ever end.

    Raises:
        GangError: the Ray that this process started is gone.
    """
    if cluster.has_died():
        raise GangError("Ray's own processes on this machine were ended from outside, or ran out of memory")


def rank_order(places: Sequence[Whereabouts]) -> list[int]:
    """Indices in the order of the ranks: node by node (by address), then by GPU number."""

    def key(index: int) -> tuple[int, str, int, int]:
        where = places[index]
        gpu = -1 if where.gpu_index is None else where.gpu_index
        return int(ipaddress.ip_address(where.node_ip)), where.node_id, gpu, index

    return sorted(range(len(places)), key=key)


def shards_last(places: Sequence[Whereabouts], order: Sequence[int], *, num_shards: int) -> list[int]:
    """``order`` with ``num_shards`` of its indices at the end, spread over the nodes: those that hold parameters.

    Each in turn goes to the node with the fewest shards, of those to the one with the most workers left.
    """
    workers = list(order)
    shards: list[int] = []

    def crowd(index: int) -> tuple[int, int]:
        node_id = places[index].node_id
        return (
            sum(places[i].node_id == node_id for i in shards),
            -sum(places[i].node_id == node_id for i in workers),
        )

    for _ in range(num_shards):
        chosen = min(reversed(workers), key=crowd)
        workers.remove(chosen)
        shards.append(chosen)
    return workers + shards


def check_devices(places: Sequence[Whereabouts]) -> None:
    """Every worker its own GPU.

    Raises:
        GangError: two workers share one.
    """
    owner: dict[str, int] = {}
    for index, where in enumerate(places):
        if where.gpu_uuid is None:
            continue
        if where.gpu_uuid in owner:
            raise GangError(
                f"workers {owner[where.gpu_uuid]} and {index} share one GPU ({where.gpu_uuid} on "
                f"{where.hostname}); NCCL needs one each. Lower strategy.num_workers to the number "
                "of GPUs, or start Ray with --num-gpus as many as there are"
            )
        owner[where.gpu_uuid] = index
