"""The queue of the runs on a cluster: a detached actor that their drivers share.

It holds what the drivers report, and answers by the decisions of :mod:`orchestrator.policy.queue_order`. Each poll
carries the whole entry of a run, so that a queue that was killed has all entries again after one poll of each driver.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
import ray.exceptions

from orchestrator.compat.ray.gcs import free_resources, on_head
from orchestrator.driver.process import cluster
from orchestrator.driver.process.origin import who_asks
from orchestrator.driver.process.waiting import cluster_state
from orchestrator.policy import queue_order
from orchestrator.protocol.queue_entries import NodeResources, QueueAnswer, QueueEntry

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


ANSWER_TIMEOUT_S = 10.0


class QueueError(Exception):
    """The queue cannot do what was asked; the message says why."""


class QueueControl:
    """The queue of the cluster at ``address``. Use as a context manager, which joins the cluster.

    Raises:
        QueueError: the cluster cannot be joined, or its queue does not answer.
        ConfigError: Ray cannot join the cluster.
    """

    def __init__(self, address: str):
        self._address = address
        self._connected = contextlib.ExitStack()

    def __enter__(self) -> QueueControl:
        if (error := cluster.address_error(self._address, key="--address")) is not None:
            raise QueueError(error)
        self._connected.enter_context(cluster.connected(self._address, metadata={"job_name": "orchestrator queue"}))
        return self

    def __exit__(self, *_: object) -> None:
        self._connected.close()

    def entries(self) -> list[QueueEntry]:
        """Return the runs with workers, then those that wait, in the order of the line, and then the unfit ones."""
        entries: list[QueueEntry] = self._ask("entries") or []
        return entries

    def why_waiting(self, entry: QueueEntry) -> str:
        """Return why a run without workers has none, as one sentence."""
        return queue_order.why_waiting(
            entry, cluster_state(own_label=entry.label, trouble=entry.avoids), now=time.time()
        )

    def has(self, run: str) -> bool:
        """Return whether a run in the queue is named so."""
        return bool(queue_order.find_entries(self.entries(), run))

    def cancel(self, run: str) -> str:
        """Let the driver of a run stop it; returns the name of the run.

        Raises:
            QueueError: no run in the queue, or several, are named so.
        """
        entry = self._find(run)
        self._ask("cancel", entry.uid, who_asks())
        return entry.name

    def set_priority(self, run: str, priority: int) -> str:
        """Change the priority of a run. Returns and raises as :meth:`cancel`."""
        entry = self._find(run)
        self._ask("set_priority", entry.uid, priority)
        return entry.name

    def _find(self, run: str) -> QueueEntry:
        entries = self.entries()
        found = queue_order.find_entries(entries, run)
        if len(found) == 1:
            return found[0]
        if found:
            listed = ", ".join(f"{e.id} ({e.state}, {e.location})" for e in found)
            raise QueueError(f"{run}: several runs have this name; give the id of one: {listed}")
        names = ", ".join(e.name for e in entries)
        raise QueueError(f"{run}: no such run in the queue; " + (f"it has: {names}" if names else "it is empty"))

    def _ask(self, method: str, *args: Any) -> Any:
        """Call a method of the queue and return its answer; None if the cluster has no queue."""
        if (queue := find_queue()) is None:
            return None
        try:
            return ray.get(getattr(queue, method).remote(*args), timeout=ANSWER_TIMEOUT_S)
        except ray.exceptions.RayError as e:
            raise QueueError(f"the queue does not answer ({type(e).__name__}); try again in some seconds") from e
