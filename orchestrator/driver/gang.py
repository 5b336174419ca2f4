"""The gang: placement group and actors of a run, acquired and released together, replaced one by one."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

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
from orchestrator.messages import Heartbeat, Whereabouts
from orchestrator.plan import Plan
from orchestrator.worker.actor import remote_worker

WAITING_MESSAGE_EVERY_S = 5.0
RELEASE_TIMEOUT_S = 5.0
SPARE_TIMEOUT_S = 1.0
"""A spare that does not answer at once is none."""


class GangError(RuntimeError):
    """The workers could not be brought together; the text says why and what to do."""


@dataclass(frozen=True)
class Member:
    """A worker in its place: its rank, its actor, and where that landed."""

    global_rank: int
    local_rank: int
    actor: Any
    where: Whereabouts
    bundle: int


class Gang:
    """All workers of a run. Use as a context manager: whatever happens, everything is released."""

    def __init__(self, plan: Plan, config: ClusterConfig, *, label: str):
        self._plan = plan
        self._config = config
        self._label = label
        self._group: PlacementGroup | None = None
        self._actors: dict[int, Any] = {}  # by bundle
        self._started = 0
        self._spare_bundles: list[int] = []
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
        self._reserve(on_wait, poll)
        bundles = self._bundles_by_node()
        for bundle in bundles:
            self._start(bundle)
        self._seat(bundles, poll)

    def replace(self, ranks: Sequence[int]) -> None:
        """Give each of ``ranks`` another worker: a spare, or a new actor in the place of the old one.

        Raises:
            GangError: a new one does not start, or dies at once; the gang can be asked again.
        """
        for rank in ranks:
            lost = self.members[rank]
            self._kill(lost.bundle)
            bundle = self._take_spare(lost.where.node_id)
            if bundle is None:
                bundle = lost.bundle
                self._start(bundle)
            else:
                self._vacant.append(lost.bundle)
            self._put(replace(lost, actor=self._actors[bundle], bundle=bundle))
        places = self._whereabouts([self.members[rank].bundle for rank in ranks])
        for rank, where in zip(ranks, places, strict=True):
            self._put(replace(self.members[rank], where=where))
        check_devices([m.where for m in self.members])

    def refill(self) -> None:
        """Start new spares where lost workers were; not while the others wait, for starting takes their CPUs."""
        while self._vacant:
            bundle = self._vacant.pop()
            self._start(bundle)
            self._spare_bundles.append(bundle)

    def release(self) -> None:
        """Kill the actors and give the resources back. Never raises."""
        with contextlib.suppress(Exception):
            for actor in self._actors.values():
                ray.kill(actor)
        if self._group is not None:
            # Where Ray is dead, this call would wait a minute for it.
            thread = threading.Thread(target=_remove, args=(self._group,), daemon=True)
            thread.start()
            thread.join(RELEASE_TIMEOUT_S)
        self._actors, self._group, self.members = {}, None, ()

    def heartbeats(self, *, with_system_metrics: bool) -> dict[int, Heartbeat]:
        """What the workers answer within a heartbeat's time, by rank; the silent and dead left out."""
        spoken_for: set[str] = set()
        asked: dict[Any, int] = {}
        for member in self.members:
            first_of_node = member.where.node_id not in spoken_for
            spoken_for.add(member.where.node_id)
            ask = with_system_metrics and first_of_node
            asked[member.actor.heartbeat.remote(ask)] = member.global_rank
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=max(1.0, self._config.heartbeat_s))
        beats: dict[int, Heartbeat] = {}
        for reference in ready:
            with contextlib.suppress(ray.exceptions.RayError):
                beats[asked[reference]] = cast(Heartbeat, ray.get(reference))
        return beats

    def ask(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Every worker's answer to a control call, by rank.

        Raises:
            GangError: not in time, or Ray is gone.
            RayError: a worker is gone.
        """
        return self._answers([getattr(m.actor, method).remote(*args) for m in self.members], timeout_s)

    def _answers(self, references: list[Any], timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        waiting = references
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.5)
            check_ray()
            if waiting and time.monotonic() > deadline:
                raise GangError(f"{len(waiting)} of {len(references)} workers did not answer within {timeout_s:g} s")
        return ray.get(references)

    def ask_one(self, rank: int, method: str, *args: Any, timeout_s: float) -> Any:
        """One worker's answer to a control call. Raises as :meth:`ask`."""
        return self._answers([getattr(self.members[rank].actor, method).remote(*args)], timeout_s)[0]

    def poll(self, method: str, *args: Any, ranks: Collection[int] | None = None, timeout_s: float) -> dict[int, Any]:
        """The answers to a control call of those workers that give one in time, by rank."""
        asked = {
            getattr(m.actor, method).remote(*args): m.global_rank
            for m in self.members
            if ranks is None or m.global_rank in ranks
        }
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
        answers: dict[int, Any] = {}
        for reference in ready:
            with contextlib.suppress(ray.exceptions.RayError):
                answers[asked[reference]] = ray.get(reference)
        return answers

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
        self._kill(member.bundle)

    def _reserve(self, on_wait: Callable[[float, str], None], poll: Callable[[], None]) -> None:
        bundle: dict[str, float] = {"CPU": self._plan.cpus_per_worker}
        if self._plan.gpus_per_worker:
            bundle["GPU"] = self._plan.gpus_per_worker
        self._group = placement_group(
            [dict(bundle) for _ in range(self._plan.world_size + self._plan.spares)],
            strategy="STRICT_PACK" if self._plan.one_node else "PACK",
            name=self._label,
        )
        began = said = time.monotonic()
        while not self._group.wait(timeout_seconds=0.5):
            poll()
            now = time.monotonic()
            if now - began > self._config.pending_timeout_s:
                raise GangError(
                    f"no room for {self._plan.world_size} workers within "
                    f"{now - began:.0f} s (held by {self._holders()}); free some, lower "
                    "strategy.num_workers, or raise cluster.pending_timeout_s"
                )
            if now - said > WAITING_MESSAGE_EVERY_S:
                said = now
                on_wait(now - began, self._holders())

    def _start(self, bundle: int) -> None:
        """Start an actor in a bundle; whether it comes up is seen later."""
        assert self._group is not None
        name = f"{self._label}/worker-{self._started}"
        self._started += 1
        self._actors[bundle] = (
            remote_worker()
            .options(
                name=name,
                num_cpus=self._plan.cpus_per_worker,
                num_gpus=self._plan.gpus_per_worker,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
            )
            .remote(name, heartbeat_timeout_s=self._config.heartbeat_timeout_s)
        )

    def _kill(self, bundle: int) -> None:
        with contextlib.suppress(Exception):
            ray.kill(self._actors[bundle])

    def _put(self, member: Member) -> None:
        self.members = tuple(member if m.global_rank == member.global_rank else m for m in self.members)

    def _take_spare(self, node_id: str) -> int | None:
        """The bundle of a spare that lives, on this node if there is one."""
        asked = {self._actors[bundle].whereabouts.remote(): bundle for bundle in self._spare_bundles}
        if not asked:
            return None
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=SPARE_TIMEOUT_S)
        alive: dict[int, Whereabouts] = {}
        for reference in ready:
            with contextlib.suppress(ray.exceptions.RayError):
                alive[asked[reference]] = cast(Whereabouts, ray.get(reference))
        if not alive:
            return None
        chosen = min(alive, key=lambda bundle: (alive[bundle].node_id != node_id, bundle))
        self._spare_bundles.remove(chosen)
        return chosen

    def _seat(self, bundles: Sequence[int], poll: Callable[[], None]) -> None:
        places = self._whereabouts(bundles, poll)
        check_devices(places)
        order = rank_order(places)
        seated = shards_last(places, order[: self._plan.world_size], num_shards=self._plan.mesh.num_shards)
        members: list[Member] = []
        on_node: dict[str, int] = {}
        for rank, index in enumerate(seated):
            where = places[index]
            local_rank = on_node.setdefault(where.node_id, 0)
            on_node[where.node_id] += 1
            bundle = bundles[index]
            actor = self._actors[bundle]
            members.append(Member(global_rank=rank, local_rank=local_rank, actor=actor, where=where, bundle=bundle))
        self.members = tuple(members)
        self._spare_bundles = [bundles[index] for index in order[self._plan.world_size :]]

    def _whereabouts(self, bundles: Sequence[int], poll: Callable[[], None] = lambda: None) -> list[Whereabouts]:
        """Where the actors of these bundles landed, once they are up.

        Raises:
            GangError: one is not, in time.
        """
        references = [self._actors[bundle].whereabouts.remote() for bundle in bundles]
        deadline = time.monotonic() + self._config.rendezvous_timeout_s
        waiting = list(references)
        while waiting:
            poll()
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.5)
            check_ray()
            if waiting and time.monotonic() > deadline:
                raise GangError(
                    f"{len(waiting)} of {len(references)} workers did not start within "
                    f"{self._config.rendezvous_timeout_s:g} s; see Ray's logs, or raise "
                    "cluster.rendezvous_timeout_s"
                )
        try:
            return cast("list[Whereabouts]", ray.get(references))
        except ray.exceptions.RayError as e:
            raise GangError(f"a worker died while it started: {e}") from e

    def _bundles_by_node(self) -> list[int]:
        """Bundle indices with those of a node together: Ray promises no order of its own."""
        assert self._group is not None
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        return sorted(nodes, key=lambda bundle: (nodes[bundle], bundle))

    def _holders(self) -> str:
        """The other placement groups that hold resources."""
        others = [
            f"{group['name'] or 'unnamed'} ({len(group['bundles'])} bundles)"
            for group in placement_group_table().values()
            if group["state"] == "CREATED"
        ]
        return ", ".join(others) or "other Ray tasks"


@ray.remote(num_cpus=0, max_retries=0)
def _kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _remove(group: PlacementGroup) -> None:
    with contextlib.suppress(Exception):
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
