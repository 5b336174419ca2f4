"""What people do with the queue of a cluster: they list its runs, cancel one, or change a priority."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import ray
import ray.exceptions

from orchestrator.driver.process import cluster
from orchestrator.driver.process.origin import who_asks
from orchestrator.driver.process.waiting import cluster_state
from orchestrator.features.queue import queue_order
from orchestrator.features.queue.entries import QueueEntry
from orchestrator.features.queue.run_queue import find_queue

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
