"""The queue of the runs on a cluster: a detached actor that their drivers share.

It holds what the drivers report, and answers by the decisions of :mod:`orchestrator.features.queue.queue_order`. Each
poll carries the whole entry of a run, so that a queue that was killed has all entries again after one poll of each
driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray

from orchestrator.compat.ray.gcs import free_resources, on_head
from orchestrator.driver.process import cluster
from orchestrator.features.queue import queue_order
from orchestrator.features.queue.entries import NodeResources, QueueAnswer, QueueEntry

NAME, NAMESPACE = "queue", "orchestrator"
POLL_EVERY_S = 1.0
"""The interval at which a driver polls."""
STALE_S = 10 * POLL_EVERY_S
"""A run whose driver does not poll for so long is no longer in the queue."""
SETTLE_S = 3 * POLL_EVERY_S
"""A queue that was started again admits no run for so long, until all drivers have polled."""


@dataclass
class _Run:
    """A run in the queue.

    Attributes:
        heard_at: when its driver last polled, by the clock of the queue.
        priority: the priority that a person has given it; None if nobody has.
        cancelled_by: see :class:`QueueAnswer`.
    """

    entry: QueueEntry
    heard_at: float
    priority: int | None = None
    cancelled_by: str | None = None


def cluster_resources() -> dict[str, NodeResources]:
    """Return the resources of the cluster's living nodes, by their ids."""
    free_by_node = free_resources()
    return {
        node.node_id: NodeResources(
            cpus=node.cpus, gpus=node.gpus, free_cpus=free.get("CPU", 0.0), free_gpus=free.get("GPU", 0.0)
        )
        for node in cluster.nodes()
        if (free := free_by_node.get(node.node_id)) is not None
    }


class RunQueue:
    """The entries of the queue, as its drivers report them.

    Args:
        settle_s: admit no run for so long after the start.
        clock: seconds of a monotonic clock.
        nodes: finds the resources of the cluster.
    """

    def __init__(
        self,
        *,
        settle_s: float,
        clock: Callable[[], float] = time.monotonic,
        nodes: Callable[[], Mapping[str, NodeResources]] = cluster_resources,
    ):
        self._clock = clock
        self._nodes = nodes
        self._settled_at = clock() + settle_s
        self._runs: dict[str, _Run] = {}  # by uid

    def poll(self, entry: QueueEntry) -> QueueAnswer:
        """Take over what a driver reports of its run, and answer."""
        now = self._clock()
        for uid in queue_order.stale({uid: run.heard_at for uid, run in self._runs.items()}, now, timeout_s=STALE_S):
            self.leave(uid)
        run = self._runs.setdefault(entry.uid, _Run(entry, now))
        if run.priority is not None:
            entry = replace(entry, priority=run.priority)
        run.entry, run.heard_at = entry, now
        entries, nodes = self._look()
        entry = next(e for e in entries if e.uid == entry.uid)
        waiting = queue_order.line(entries)
        admitted, leaving = entry.state == "reserving", []
        if waiting and now >= self._settled_at:
            free = queue_order.unreserved_by_node(nodes, entries)
            admitted = entry in waiting and queue_order.may_reserve(entry, entries, free)
            leaving = queue_order.victims(entries, free)
        ahead = waiting[: waiting.index(entry)] if entry in waiting else []
        passed = tuple(e.uid for e in ahead if e.state == "waiting")  # the others reserve too
        overtakes = passed if admitted and entry.state == "waiting" else entry.overtook
        if admitted:
            run.entry = replace(entry, state="reserving", overtook=overtakes)
        return QueueAnswer(
            may_reserve=admitted,
            ahead=tuple(e.name for e in ahead),
            overtakes=overtakes,
            running=tuple(e.name for e in entries if e.has_workers and e.uid != entry.uid),
            others_wait=any(e.uid != entry.uid for e in waiting),
            yield_to=waiting[0].name if entry in leaving else None,
            priority=entry.priority,
            cancelled_by=run.cancelled_by,
            unfit=entry.state == "unfit",
            namesakes=queue_order.namesakes(entry, entries),
        )

    def leave(self, uid: str) -> None:
        """Forget a run that has ended."""
        self._runs.pop(uid, None)

    def entries(self) -> list[QueueEntry]:
        """Return the runs with workers in the order of their submission, then the line, and then the unfit runs."""
        entries, _ = self._look()
        by_submission = sorted(entries, key=lambda e: e.submitted_at)
        with_workers = [e for e in by_submission if e.has_workers]
        return [*with_workers, *queue_order.line(entries), *(e for e in by_submission if e.state == "unfit")]

    def cancel(self, uid: str, by: str) -> None:
        """Let the driver of a run stop it with its next poll; ``by``: who wants that."""
        if (run := self._runs.get(uid)) is not None:
            run.cancelled_by = by

    def set_priority(self, uid: str, priority: int) -> None:
        """Change the priority of a run. Its driver keeps the new one."""
        if (run := self._runs.get(uid)) is not None:
            run.priority, run.entry = priority, replace(run.entry, priority=priority)

    def _look(self) -> tuple[list[QueueEntry], Mapping[str, NodeResources]]:
        """Return the entries, marked if unfit or over the share of their user, and the nodes.

        The nodes are only looked up if a run waits.
        """
        entries = [run.entry for run in self._runs.values()]
        nodes = {} if all(e.has_workers for e in entries) else self._nodes()
        return queue_order.marked_over_share(queue_order.marked_unfit(entries, nodes), nodes), nodes


@ray.remote(num_cpus=0, max_restarts=-1)
class RunQueueActor(RunQueue):
    """The queue as an actor. Ray starts it again if its process dies."""

    def __init__(self, settle_s: float):
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        super().__init__(settle_s=SETTLE_S if restarted else settle_s)


def open_queue(*, again: bool) -> Any:
    """Return the queue of the cluster, which is made if there is none; ``again``: there was one, which is gone."""
    options = {"name": NAME, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    actor = RunQueueActor.options(**options, resources=on_head())  # type: ignore[attr-defined]
    return actor.remote(SETTLE_S if again else 0.0)


def find_queue() -> Any | None:
    """Return the queue of the cluster; None if no run has made one."""
    try:
        return ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return None
