"""Slots: resources for one worker each, reserved in the cluster, and the actors that run in them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any, cast

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from orchestrator.driver.calls import GangError, check_ray, completed
from orchestrator.driver.waiting import ResourceWait
from orchestrator.driver.worker_code import WorkerCode
from orchestrator.planning.plan import Plan
from orchestrator.protocol.messages import Variables, WorkerInfo
from orchestrator.worker.actor import remote_worker

RELEASE_TIMEOUT_S = 5.0
START_ATTEMPTS = 3


class Slots:
    """The slots of a run, by number. Those reserved together become available together; more can be added later."""

    def __init__(
        self,
        plan: Plan,
        code: WorkerCode,
        *,
        start_timeout_s: float,
        heartbeat_timeout_s: float,
        variables: Variables,
        label: str,
    ):
        self._resources: dict[str, float] = {"CPU": plan.cpus_per_worker}
        if plan.gpus_per_worker:
            self._resources["GPU"] = plan.gpus_per_worker
        self._code = code
        self._start_timeout_s = start_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._variables = variables
        self._label = label
        self._bundles: list[tuple[PlacementGroup, int]] = []
        self._actors: dict[int, Any] = {}
        self._started = 0

    def reserve_all(self, count: int, *, one_node: bool, wait: ResourceWait) -> list[int]:
        """Reserve ``count`` slots and wait until they are available; returns them node by node.

        Raises:
            GangError, Interrupted: see :meth:`ResourceWait.check`.
        """
        group = self._reserve(count, "STRICT_PACK" if one_node else "PACK")
        while not group.wait(timeout_seconds=0.5):
            wait.check()
        # Ray may place the bundles of a group in any order.
        nodes = placement_group_table(group)["bundles_to_node_id"]
        return sorted(nodes, key=lambda bundle: (nodes[bundle], bundle))

    def reserve(self) -> int:
        """Reserve one more slot, on any node, and return it at once; it is available when the cluster has room."""
        self._reserve(1, "PACK")
        return len(self._bundles) - 1

    def start(self, slot: int) -> Any:
        """Start an actor in ``slot``.

        Returns:
            A reference to its :class:`WorkerInfo`, which is ready when the actor is up.
        """
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
                runtime_env=self._code.runtime_env(),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            )
            .remote(
                name,
                heartbeat_timeout_s=self._heartbeat_timeout_s,
                variables=self._variables,
                requirements=self._code.pip,
                install_timeout_s=self._start_timeout_s,
            )
        )
        self._actors[slot] = actor
        return actor.worker_info.remote()

    def start_and_wait(self, slots: Sequence[int], wait: ResourceWait) -> dict[int, WorkerInfo]:
        """Start an actor in each of ``slots`` and wait until all are up; one that dies meanwhile is started again.

        Raises:
            GangError: a worker did not come up in time, or died :data:`START_ATTEMPTS` times, or Ray is dead.
            Interrupted: a stop was requested.
        """
        infos: dict[int, WorkerInfo] = {}
        attempts = dict.fromkeys(slots, 1)
        starting = {self.start(slot): slot for slot in slots}
        while starting:
            ready = completed(starting, 0.2)
            check_ray()
            wait.check()
            for reference in ready:
                slot = starting.pop(reference)
                try:
                    infos[slot] = cast(WorkerInfo, ray.get(reference))
                except ray.exceptions.RayError as e:
                    if attempts[slot] == START_ATTEMPTS:
                        raise GangError(
                            f"{START_ATTEMPTS} workers in a row died while they started; see Ray's logs"
                        ) from e
                    attempts[slot] += 1
                    starting[self.start(slot)] = slot
        return infos

    def host_names(self, slots: Sequence[int]) -> list[str]:
        """Return the name of the node of each slot, which must be available."""
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
        bundles = [self._bundles[slot] for slot in slots]
        groups = {group.id: group for group, _ in bundles}
        nodes = {key: placement_group_table(group)["bundles_to_node_id"] for key, group in groups.items()}
        return [names[nodes[group.id][index]] for group, index in bundles]

    def actor(self, slot: int) -> Any:
        """Return the handle of the actor that was last started in ``slot``."""
        return self._actors[slot]

    def kill(self, slot: int) -> None:
        """Kill the actor in ``slot``; the slot stays reserved. Never raises."""
        with contextlib.suppress(Exception):
            ray.kill(self._actors[slot])

    def release(self) -> None:
        """Kill the actors and give the resources back. Never raises."""
        for slot in self._actors:
            self.kill(slot)
        # In a thread of its own, because the call takes a minute if Ray is dead.
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


def kill_process(info: WorkerInfo) -> None:
    """Kill a process with a signal on its own node: ``ray.kill`` takes seconds if the process is stopped (SIGSTOP)."""
    if info.node_id == ray.get_runtime_context().get_node_id():
        with contextlib.suppress(ProcessLookupError):
            os.kill(info.pid, signal.SIGKILL)
    else:
        on_node = NodeAffinitySchedulingStrategy(info.node_id, soft=False)
        _kill_process.options(scheduling_strategy=on_node).remote(info.pid)


@ray.remote(num_cpus=0, max_retries=0)
def _kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _remove(groups: Sequence[PlacementGroup]) -> None:
    for group in groups:
        with contextlib.suppress(Exception):
            remove_placement_group(group)
