"""Slots: room for a worker each in the cluster, and the actors in them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from orchestrator.driver.calls import GangError, check_ray
from orchestrator.planning.plan import Plan
from orchestrator.protocol.messages import WorkerInfo
from orchestrator.worker.actor import remote_worker

WAITING_MESSAGE_EVERY_S = 5.0
RELEASE_TIMEOUT_S = 5.0
STARTS_TRIED = 3


class Slots:
    """Those of a run, by number. Those that are reserved together Ray gives together; more can follow."""

    def __init__(self, plan: Plan, *, heartbeat_timeout_s: float, label: str):
        self._resources: dict[str, float] = {"CPU": plan.cpus_per_worker}
        if plan.gpus_per_worker:
            self._resources["GPU"] = plan.gpus_per_worker
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._label = label
        self._bundles: list[tuple[PlacementGroup, int]] = []
        self._actors: dict[int, Any] = {}
        self._started = 0

    def reserve_all(self, count: int, *, one_node: bool, waiting: Waiting) -> list[int]:
        """Room for ``count`` workers, once it is there; the slots of a node follow each other."""
        group = self._reserve(count, "STRICT_PACK" if one_node else "PACK")
        while not group.wait(timeout_seconds=0.5):
            waiting.go_on()
        # Ray promises no order of its own.
        nodes = placement_group_table(group)["bundles_to_node_id"]
        return sorted(nodes, key=lambda bundle: (nodes[bundle], bundle))

    def reserve(self) -> int:
        """Room for one more, wherever and whenever the cluster has it."""
        self._reserve(1, "PACK")
        return len(self._bundles) - 1

    def start(self, slot: int) -> Any:
        """Start an actor; returns its answer to come, where it is, once it is up."""
        name = f"{self._label}/worker-{self._started}"
        self._started += 1
        group, bundle = self._bundles[slot]
        actor = (
            remote_worker()
            .options(
                name=name,
                num_cpus=self._resources["CPU"],
                num_gpus=self._resources.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            )
            .remote(name, heartbeat_timeout_s=self._heartbeat_timeout_s)
        )
        self._actors[slot] = actor
        return actor.worker_info.remote()

    def start_and_wait(self, slot: int, waiting: Waiting) -> WorkerInfo:
        """Where a new actor landed.

        Raises:
            GangError: not in time, or each one dies at once.
        """
        for _ in range(STARTS_TRIED):
            up = self.start(slot)
            while not ray.wait([up], timeout=0.2)[0]:
                check_ray()
                waiting.go_on()
            with contextlib.suppress(ray.exceptions.RayError):
                return cast(WorkerInfo, ray.get(up))
        raise GangError(f"{STARTS_TRIED} workers died one after another while they started; see Ray's logs")

    def actor(self, slot: int) -> Any:
        return self._actors[slot]

    def kill(self, slot: int) -> None:
        with contextlib.suppress(Exception):
            ray.kill(self._actors[slot])

    def release(self) -> None:
        """Kill the actors and give the room back. Never raises."""
        with contextlib.suppress(Exception):
            for actor in self._actors.values():
                ray.kill(actor)
        # Where Ray is dead, this call would wait a minute for it.
        groups = {group.id: group for group, _ in self._bundles}
        thread = threading.Thread(target=_remove, args=(list(groups.values()),), daemon=True)
        thread.start()
        thread.join(RELEASE_TIMEOUT_S)
        self._actors, self._bundles = {}, []

    def _reserve(self, count: int, strategy: str) -> PlacementGroup:
        name = f"{self._label}/{len(self._bundles)}"
        group: PlacementGroup = placement_group(
            [dict(self._resources) for _ in range(count)], strategy=strategy, name=name
        )
        self._bundles += [(group, index) for index in range(count)]
        return group


class Waiting:
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


def kill_process(info: WorkerInfo) -> None:
    """End a process on its own node, at once: a stopped one outlives Ray's own way for seconds."""
    if info.node_id == ray.get_runtime_context().get_node_id():
        with contextlib.suppress(ProcessLookupError):
            os.kill(info.pid, signal.SIGKILL)
    else:
        there = NodeAffinitySchedulingStrategy(info.node_id, soft=False)
        _kill_process.options(scheduling_strategy=there).remote(info.pid)


@ray.remote(num_cpus=0, max_retries=0)
def _kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _remove(groups: Sequence[PlacementGroup]) -> None:
    with contextlib.suppress(Exception):
        for group in groups:
            remove_placement_group(group)
