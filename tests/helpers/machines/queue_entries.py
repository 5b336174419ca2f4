"""Runs in the queue of a cluster."""

from typing import Any

from orchestrator.features.queue.entries import QueueEntry


def entry(name: str, *, at: float = 0.0, **fields: Any) -> QueueEntry:
    """A run of one worker with one CPU that was submitted ``at``, and has its workers on node ``a`` if it runs."""
    values: dict[str, Any] = {
        "uid": name, "name": name, "location": f"/outputs/2026-05-01/{name}", "user": "ada", "host": "laptop",
        "submitted_at": at, "priority": 0, "workers": 1, "cpus_per_worker": 1.0, "gpus_per_worker": 0.0,
        "one_node": False, "autoscaling": False, "since": at,
    }  # fmt: skip
    if fields.get("state") in ("running", "yielding"):
        values["workers_by_node"] = {"a": fields.get("workers", 1)}
    return QueueEntry(**(values | fields))
