"""The queue of the runs on a cluster as a table."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from orchestrator.display.text import duration, takes_unicode
from orchestrator.display.text_table import TableColumn, text_lines
from orchestrator.protocol.queue import QueueEntry


def queue_table(entries: Sequence[QueueEntry], *, now: float) -> str:
    """Return a table with one row per run.

    Args:
        entries: the runs with workers, then those in the line, in its order, and then the unfit ones.
        now: seconds since the epoch, for the time that a run has been in its state.
    """
    numbers = itertools.count(1)
    places = ["-" if e.has_workers or e.state == "unfit" else str(next(numbers)) for e in entries]
    columns = [
        TableColumn(heading="place", cells=places),
        TableColumn(heading="state", justify="left", cells=[e.state for e in entries]),
        TableColumn(heading="priority", cells=[str(e.priority) for e in entries]),
        TableColumn(heading="run", justify="left", cells=["/".join(e.location.split("/")[-2:]) for e in entries]),
        TableColumn(heading="id", justify="left", cells=[e.id for e in entries]),
        TableColumn(heading="user", justify="left", cells=[f"{e.user} on {e.host}" for e in entries]),
        TableColumn(heading="needs", justify="left", cells=[_needs(e) for e in entries]),
        TableColumn(heading="since", cells=[duration(max(0.0, now - e.since), whole=True) for e in entries]),
    ]
    return "\n".join(text_lines(columns, unicode=takes_unicode(sys.stdout)))


def _needs(entry: QueueEntry) -> str:
    """The resources that a run has, or needs at least."""
    workers = sum(entry.workers_by_node.values()) or entry.workers
    each = f"{entry.cpus_per_worker:g} CPU" + (f" and {entry.gpus_per_worker:g} GPU" if entry.gpus_per_worker else "")
    return f"{workers} x {each}"
