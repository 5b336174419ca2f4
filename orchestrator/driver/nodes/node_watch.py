"""Silent nodes, stopped worker processes and draining nodes, found by a probe on each node."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.compat.ray.gcs import all_nodes, draining_nodes
from orchestrator.protocol.messages import WorkerInfo

DRAINING_CHECK_EVERY_S = 1.0
JOIN_TIMEOUT_S = 1.0
PROBE_RESTART_S = 5.0
"""The least time between two starts of the probe of a node."""
RAYLET_TIMEOUT_S = 1.0
"""The time in which the raylet of a living node accepts a connection."""


@ray.remote(num_cpus=0, max_restarts=0)
class NodeProbe:
    """A process on a node that answers even while every worker there is busy."""

    @ray.method(enable_task_events=False)  # as Worker.heartbeat
    def ping(self, pids: tuple[int, ...]) -> frozenset[int]:
        """Return the stopped processes among ``pids``."""
        return stopped_processes(pids)


def stopped_processes(pids: Iterable[int]) -> frozenset[int]:
    """Return the processes of this machine among ``pids`` that a signal has stopped (SIGSTOP or SIGTSTP)."""
    return frozenset(pid for pid in pids if _is_stopped(pid))


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


@dataclass
class _Probe:
    """The probe of one node.

    Attributes:
        ping: its pending answer; None if it has died.
        heard_at: when the node last answered; None if the probe is not up yet, so that nothing is known.
        stopped: the stopped processes, as of the last answer.
    """

    actor: Any
    ping: Any | None
    started_at: float
    heard_at: float | None = None
    stopped: frozenset[int] = frozenset()


class NodeWatch:
    """Watches the nodes of a run. Use as a context manager, while Ray is connected.

    A node is silent when neither its probe nor any worker on it has answered for ``timeout_s``, counted from the first
    answer of the probe. A probe that dies is started again. The driver's own node has no probe: its loss ends the
    driver too.

    Attributes:
        draining: the ids of the nodes that have been told to drain, at most about a second old.
        lost: the ids of the nodes that were found silent or dead, and on which no worker has started since.
    """

    def __init__(self, timeout_s: float):
        self.draining: Collection[str] = ()
        self.lost: set[str] = set()
        self._timeout_s = timeout_s
        self._own_node = ""
        self._probes: dict[str, _Probe] = {}
        self._raylets: dict[str, tuple[str, int]] = {}  # the address and port of each, by node id
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

    def silent(self, workers: Mapping[str, Mapping[int, bool]], now: float) -> Collection[str]:
        """Return the ids of the silent nodes. To be called several times a second.

        Args:
            workers: for the id of each node with workers, whether each of their processes has just answered.
            now: seconds of a monotonic clock.
        """
        for node_id in self._probes.keys() - workers.keys():
            self._forget(node_id)
        for node_id in workers.keys() - {self._own_node}:
            self._poll(node_id, workers[node_id], now)
        heard_at = {node_id: p.heard_at for node_id, p in self._probes.items() if p.heard_at is not None}
        return [node_id for node_id, at in heard_at.items() if now - at > self._timeout_s]

    def has_answered(self, node_id: str) -> bool:
        """Return whether the probe of a node is up, without which the silence of the node is not noticed."""
        return node_id == self._own_node or (node_id in self._probes and self._probes[node_id].heard_at is not None)

    def find_gone(self, node_ids: Collection[str]) -> Collection[str]:
        """Return the nodes on which no raylet answers any more, within :data:`RAYLET_TIMEOUT_S` for all.

        Ray itself notices the death of a host seconds later. Nodes whose raylet is not known, because they have not
        been watched, are left out.
        """
        asked = [node_id for node_id in node_ids if node_id != self._own_node and node_id in self._raylets]
        if not asked:
            return ()
        with ThreadPoolExecutor(len(asked)) as threads:
            answers = list(threads.map(_accepts_connections, (self._raylets[node_id] for node_id in asked)))
        return [node_id for node_id, answered in zip(asked, answers, strict=True) if not answered]

    def trouble(self) -> Mapping[str, str]:
        """Return why no worker should start on some nodes, by node id."""
        return dict.fromkeys(self.draining, "is draining") | dict.fromkeys(self.lost, "does not answer")

    def note_dead(self) -> None:
        """Add the nodes that Ray has found dead to the lost ones."""
        self.lost.update(n.node_id.hex() for n in all_nodes() if n.state != n.ALIVE)

    def is_stopped(self, worker: WorkerInfo) -> bool:
        """Return whether a signal has stopped the process of ``worker``; False if this is not known."""
        if worker.node_id == self._own_node:
            return _is_stopped(worker.pid)
        probe = self._probes.get(worker.node_id)
        return probe is not None and worker.pid in probe.stopped

    def _poll(self, node_id: str, answers: Mapping[int, bool], now: float) -> None:
        """Take the answer of a node's probe if there is one, and ask for the next."""
        probe = self._probes.get(node_id)
        if probe is None or (probe.ping is None and now - probe.started_at > PROBE_RESTART_S):
            if node_id not in self._raylets:
                self._raylets = {n.node_id.hex(): (n.node_manager_address, n.node_manager_port) for n in all_nodes()}
            self._probes[node_id] = _started(node_id, answers, now)
            return
        if probe.ping is not None and ray.wait([probe.ping], timeout=0)[0]:
            try:
                probe.stopped = ray.get(probe.ping)
            except ray.exceptions.ActorUnavailableError:
                probe.ping = probe.actor.ping.remote(tuple(answers))
            except ray.exceptions.RayError:
                probe.ping = probe.heard_at = None
            else:
                probe.heard_at = now
                probe.ping = probe.actor.ping.remote(tuple(answers))
        if probe.heard_at is not None and any(answers.values()):
            probe.heard_at = now

    def _watch_draining(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # a dead Ray is noticed elsewhere
                self.draining = draining_nodes()
            if self._closed.wait(DRAINING_CHECK_EVERY_S):
                return

    def _forget(self, node_id: str) -> None:
        probe = self._probes.pop(node_id)
        with contextlib.suppress(Exception):
            ray.kill(probe.actor)


def _accepts_connections(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=RAYLET_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _started(node_id: str, pids: Iterable[int], now: float) -> _Probe:
    on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor = NodeProbe.options(scheduling_strategy=on_node).remote()  # type: ignore[attr-defined]
    return _Probe(actor, actor.ping.remote(tuple(pids)), started_at=now)
