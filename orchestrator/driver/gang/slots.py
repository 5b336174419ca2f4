"""Slots: resources for one worker each, reserved in the cluster, and the actors that run in them, from their start."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import ray
import ray.exceptions
from ray.util.placement_group import (
    PlacementGroup,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from orchestrator.compat.ray.gcs import create_placement_group
from orchestrator.driver.code.worker_code import WorkerCode
from orchestrator.driver.process.calls import GATHER_S, GangError, check_ray, completed, describe_error
from orchestrator.driver.process.waiting import MESSAGE_EVERY_S, ResourceWait, WaitMonitor
from orchestrator.planning.plan import Plan
from orchestrator.protocol.messages import Variables, WorkerInfo
from orchestrator.worker.actor import remote_worker
from orchestrator.worker.process.pip_packages import InstallError

RELEASE_TIMEOUT_S = 5.0
NODE_ID_LABEL = "ray.io/node-id"
"""The label by which Ray itself names each node."""


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
        self.resources: dict[str, float] = {"CPU": plan.cpus_per_worker}
        if plan.gpus_per_worker:
            self.resources["GPU"] = plan.gpus_per_worker
        self._strategy = plan.strategy
        self._code = code
        self._start_timeout_s = start_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._variables = variables
        self._label = label
        self._bundles: dict[int, tuple[PlacementGroup, int]] = {}
        self._node_ids: dict[int, str] = {}  # by slot: where Ray had placed it at the last look
        self._reserved = 0
        self._actors: dict[int, Any] = {}
        self._started = 0

    def reserve_all(
        self,
        count: int,
        *,
        one_node: bool,
        avoid: Collection[str],
        wait: ResourceWait,
        gives_up: Callable[[], bool],
    ) -> dict[int, str] | None:
        """Reserve ``count`` slots, none of them on a node whose id is in ``avoid``, and wait until they are available.

        Returns:
            The id of the node of each slot, node by node. None if ``gives_up()`` becomes true before they are
            available; nothing is reserved then.

        Raises:
            GangError, Interrupted: see :meth:`ResourceWait.check`.
        """
        slots = self._reserve(count, "STRICT_PACK" if one_node else "PACK", avoid=avoid)
        group, _ = self._bundles[slots[0]]
        while not group.wait(timeout_seconds=0.5):
            wait.check()
            if gives_up():
                self._give_back(slots)
                return None
        # Ray may place the bundles of a group in any order.
        return dict(sorted(self.placed(slots).items(), key=lambda placed: (placed[1], placed[0])))

    def placed(self, slots: Iterable[int]) -> dict[int, str]:
        """Return the id of the node of each of ``slots`` that Ray has placed."""
        bundles = {slot: self._bundles[slot] for slot in slots}
        groups = {group.id: group for group, _ in bundles.values()}
        nodes = {id_: placement_group_table(group)["bundles_to_node_id"] for id_, group in groups.items()}
        node_ids = {slot: nodes[group.id][index] for slot, (group, index) in bundles.items()}
        self._node_ids |= node_ids
        return {slot: node_id for slot, node_id in node_ids.items() if node_id}

    def num_by_node(self) -> Mapping[str, int]:
        """Return the number of slots on each node, by its id, with or without actors. Another thread may call this."""
        return Counter(filter(None, list(self._node_ids.values())))

    def reserve(self, *, avoid: Collection[str]) -> int:
        """Reserve one more slot and return it at once; it is available when the cluster has room.

        ``avoid``: the ids of nodes on which it must not be. Ray takes a minute to find out that a silent one is dead.
        """
        return self._reserve(1, "PACK", avoid=avoid)[0]

    def is_alone(self, slot: int) -> bool:
        """Return whether ``slot`` was reserved alone; otherwise it cannot be given back alone."""
        group, _ = self._bundles[slot]
        return sum(other is group for other, _ in self._bundles.values()) == 1

    def withdraw(self, slot: int) -> bool:
        """Kill the actor in ``slot``, and give the slot back if it was reserved alone; returns whether it was."""
        self.kill(slot)
        alone = self.is_alone(slot)
        if alone:
            self._give_back([slot])
        return alone

    def start(self, slot: int) -> Any:
        """Start an actor in ``slot``.

        Returns:
            A reference to its :class:`WorkerInfo`, which is ready when the actor is up.
        """
        name = f"{self._label}/worker-{self._started}"
        self._started += 1
        group, bundle = self._bundles[slot]
        actor = (
            remote_worker(self._strategy)
            .options(
                name=name,
                num_cpus=self.resources["CPU"],
                num_gpus=self.resources.get("GPU", 0),
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
        self._give_back(list(self._bundles))
        self._actors = {}

    def _reserve(self, count: int, strategy: str, *, avoid: Collection[str]) -> list[int]:
        slots = list(range(self._reserved, self._reserved + count))
        avoided = ",".join(sorted(avoid))
        group = create_placement_group(
            [dict(self.resources) for _ in slots],
            strategy=strategy,
            name=f"{self._label}/{self._reserved}",
            bundle_label_selector=[{NODE_ID_LABEL: f"!in({avoided})"} for _ in slots] if avoided else None,
        )
        self._bundles |= {slot: (group, index) for index, slot in enumerate(slots)}
        self._reserved += count
        return slots

    def _give_back(self, slots: Collection[int]) -> None:
        """Remove the placement groups of ``slots``, which are all of theirs. Never raises."""
        groups = {group.id: group for group, _ in map(self._bundles.pop, slots)}
        for slot in slots:
            self._node_ids.pop(slot, None)
        # In a thread of its own, because the call takes a minute if Ray is dead.
        thread = threading.Thread(target=_remove, args=(list(groups.values()),), daemon=True)
        thread.start()
        thread.join(RELEASE_TIMEOUT_S)


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


_POLL_S = 0.5


def wait_for_actors(
    starting: Mapping[Any, str], *, timeout_s: float, pip: Sequence[str], monitor: WaitMonitor
) -> list[WorkerInfo]:
    """Wait until all actors are up, and report meanwhile what is missing.

    Args:
        starting: the name of the node of each actor, by the reference to its :class:`WorkerInfo`.
        pip: the requirements that the actors install first.
        monitor: checked several times a second.

    Returns:
        What the actors say about themselves, in order.

    Raises:
        GangError: an actor died, or is not up in time; or Ray is dead.
        Interrupted, SupersededError: see :meth:`WaitMonitor.check`.
    """
    began = reported_at = time.monotonic()
    pending = dict(starting)
    while pending:
        for reference in completed(pending, _POLL_S, gather_s=GATHER_S):
            _check_started(reference, host=pending.pop(reference))
        check_ray()
        monitor.check()
        now = time.monotonic()
        is_late, is_due = now - began > timeout_s, now - reported_at > MESSAGE_EVERY_S
        if not pending or not (is_late or is_due):
            continue
        what = _awaited(len(pending), len(starting), sorted(set(pending.values())), pip)
        if is_late:
            raise GangError(
                f"no {what} within {timeout_s:.0f} s; see Ray's logs there, or raise cluster.start_timeout_s"
            )
        reported_at = now
        monitor.report(now - began, what)
    return [cast(WorkerInfo, info) for info in ray.get(list(starting))]


def start_failure(error: ray.exceptions.RayError, *, host: str) -> str:
    """Return why an actor did not start on ``host``, in one line."""
    what = describe_error(error)
    if isinstance(error, ray.exceptions.RuntimeEnvSetupError):
        return f"Ray cannot bring the code of the run to {host}: {what}"
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        remedy = "lower strategy.num_workers, or end what else uses the memory of the node"
        return f"Ray ended a worker on {host} while it started, because the node ran out of memory; {remedy}"
    _, raised_by_pip, why = what.partition(f"{InstallError.__name__}: ")
    return why if raised_by_pip else f"a worker died on {host} while it started: {what}"


def _check_started(reference: Any, *, host: str) -> None:
    try:
        ray.get(reference)
    except ray.exceptions.RayError as e:
        raise GangError(start_failure(e, host=host)) from e


def _awaited(missing: int, total: int, hosts: Sequence[str], pip: Sequence[str]) -> str:
    names = [line.split()[0] for line in pip if not line.startswith("-")]  # options and URLs may hold secrets
    installs = f", where pip installs {' and '.join(names)}" if names else ""
    return f"start of {missing} of {total} workers on {' and '.join(hosts)}{installs}"
