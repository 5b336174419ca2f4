"""The queue of a cluster as a table."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from orchestrator.config.text import first_few
from orchestrator.display.plain_text import TableColumn, duration, takes_unicode, text_lines
from orchestrator.features.queue.entries import QueueEntry


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


def order_notes(entries: Sequence[QueueEntry]) -> list[str]:
    """Return one line for each run that is not in the order of priority and submission; the arguments as above."""
    waiting = {e.uid: e.name for e in entries if e.state in ("waiting", "reserving")}
    lines = []
    for entry in entries:
        if overtaken := [waiting[uid] for uid in entry.overtook if uid in waiting]:
            lines.append(
                f"{entry.name} ({entry.state}): it has overtaken {first_few(overtaken)}, and makes room as soon as "
                "the first in the line could start with its resources"
            )
        if entry.over_share:
            lines.append(
                f"{entry.name} ({entry.state}): it goes behind the runs of others, because the runs of {entry.user} "
                f"have their share already (cluster.user_share={entry.user_share:g})"
            )
    return lines


def _needs(entry: QueueEntry) -> str:
    """The resources that a run has, or needs at least."""
    workers = sum(entry.workers_by_node.values()) or entry.workers
    each = f"{entry.cpus_per_worker:g} CPU" + (f" and {entry.gpus_per_worker:g} GPU" if entry.gpus_per_worker else "")
    return f"{workers} x {each}"
