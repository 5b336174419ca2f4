"""Which nodes no longer answer, by a probe process on each, and which are draining."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.compat.ray import draining_nodes

DRAINING_CHECK_EVERY_S = 0.5
JOIN_TIMEOUT_S = 1.0


@ray.remote(num_cpus=0, max_restarts=0)
class NodeProbe:
    """A process on a node that answers even while every worker there is busy."""

    def ping(self) -> None:
        """Answer."""


def kernel_oom_kills() -> int | None:
    """Return how many processes of this machine its kernel has killed for lack of memory, also within a cgroup's limit.

    None if the kernel does not tell.
    """
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None


class NodeWatch:
    """Watches the nodes of a run. Use as a context manager, while Ray is connected.

    A node is silent when neither its probe nor any worker on it has answered for ``timeout_s``. The driver's own node
    is not watched: its loss ends the driver too.

    ``draining``: the ids of the nodes that have been told to drain, at most about a second old.
    """

    def __init__(self, timeout_s: float):
        self.draining: Collection[str] = ()
        self._timeout_s = timeout_s
        self._own_node = ""
        self._probes: dict[str, Any] = {}
        self._pings: dict[str, Any] = {}  # by node: the pending answer
        self._heard_at: dict[str, float] = {}
        self._closed = threading.Event()
        # A thread of its own, because a call to a dead Ray does not return.
        self._thread = threading.Thread(target=self._watch_draining, name="draining-nodes", daemon=True)

    def __enter__(self) -> NodeWatch:
        self._own_node = ray.get_runtime_context().get_node_id()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for node_id in list(self._probes):
            self._forget(node_id)
        self._thread.join(JOIN_TIMEOUT_S)

    def silent(self, nodes: Mapping[str, bool], now: float) -> Collection[str]:
        """Return the ids of the silent nodes. To be called several times a second.

        Args:
            nodes: for the id of each node with workers, whether one of them has just answered.
            now: seconds of a monotonic clock.
        """
        for node_id in self._probes.keys() - nodes.keys():
            self._forget(node_id)
        for node_id in nodes.keys() - {self._own_node} - self._probes.keys():
            on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._probes[node_id] = NodeProbe.options(scheduling_strategy=on_node).remote()  # type: ignore[attr-defined]
            self._pings[node_id] = self._probes[node_id].ping.remote()
            self._heard_at[node_id] = now
        for node_id, probe in self._probes.items():
            answered = bool(ray.wait([self._pings[node_id]], timeout=0)[0]) and self._succeeded(node_id)
            if answered:
                self._pings[node_id] = probe.ping.remote()
            if answered or nodes[node_id]:
                self._heard_at[node_id] = now
        return [node_id for node_id, heard_at in self._heard_at.items() if now - heard_at > self._timeout_s]

    def _watch_draining(self) -> None:
        while not self._closed.wait(DRAINING_CHECK_EVERY_S):
            with contextlib.suppress(Exception):  # a dead Ray is noticed elsewhere
                self.draining = draining_nodes()

    def _succeeded(self, node_id: str) -> bool:
        try:
            ray.get(self._pings[node_id])
        except ray.exceptions.RayError:
            return False
        return True

    def _forget(self, node_id: str) -> None:
        probe = self._probes.pop(node_id)
        del self._pings[node_id], self._heard_at[node_id]
        with contextlib.suppress(Exception):
            ray.kill(probe)
