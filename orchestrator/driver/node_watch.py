"""Whether the other machines still answer, by a process on each that does nothing else, and which have to leave."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.driver import cluster

LOOK_EVERY_S = 0.5


@ray.remote(num_cpus=0, max_restarts=0)
class NodeProbe:
    """On a node; it answers whatever the workers there are doing."""

    def answer(self) -> None:
        """That it is there."""


class NodeWatch:
    """A node counts as silent when neither its sentry nor any worker has answered for ``timeout_s``. This machine is
    not watched: if it is gone, so is the one who watches.

    ``leaving``: the nodes that have been told to drain, by their ids, as of a moment ago.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._here = ray.get_runtime_context().get_node_id()
        self._probes: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}  # by node: the answer to come
        self._heard_at: dict[str, float] = {}
        self.leaving: Collection[str] = ()
        self._closed = threading.Event()
        # On a thread of its own, for a Ray that is dead would never answer.
        threading.Thread(target=self._look, name="leaving-nodes", daemon=True).start()

    def silent(self, nodes: Mapping[str, bool], now: float) -> Collection[str]:
        """To be asked several times a second; ``nodes``: those with workers, and whether one of them has answered."""
        for node_id in self._probes.keys() - nodes.keys():
            self._forget(node_id)
        for node_id in nodes.keys() - {self._here} - self._probes.keys():
            there = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._probes[node_id] = NodeProbe.options(scheduling_strategy=there).remote()  # type: ignore[attr-defined]
            self._asked[node_id] = self._probes[node_id].answer.remote()
            self._heard_at[node_id] = now
        for node_id, probe in self._probes.items():
            answered = bool(ray.wait([self._asked[node_id]], timeout=0)[0]) and self._succeeded(node_id)
            if answered:
                self._asked[node_id] = probe.answer.remote()
            if answered or nodes[node_id]:
                self._heard_at[node_id] = now
        return [node_id for node_id, heard_at in self._heard_at.items() if now - heard_at > self._timeout_s]

    def close(self) -> None:
        """Give up watching. Never raises."""
        self._closed.set()
        for node_id in list(self._probes):
            self._forget(node_id)

    def _look(self) -> None:
        while not self._closed.wait(LOOK_EVERY_S):
            with contextlib.suppress(Exception):  # Ray is gone, which others notice
                self.leaving = cluster.leaving_nodes()

    def _succeeded(self, node_id: str) -> bool:
        try:
            ray.get(self._asked[node_id])
        except ray.exceptions.RayError:
            return False
        return True

    def _forget(self, node_id: str) -> None:
        probe = self._probes.pop(node_id)
        del self._asked[node_id], self._heard_at[node_id]
        with contextlib.suppress(Exception):
            ray.kill(probe)
