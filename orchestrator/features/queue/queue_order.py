"""The queue of the runs on a cluster: who reserves next, who makes room, and why a run waits. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from orchestrator.features.queue.entries import NodeResources, QueueEntry
from orchestrator.planning.mesh import UNITS, workers_on_node, workers_on_nodes
from orchestrator.policy.shortage import STARTING, ClusterState, Request, explain


@dataclass(frozen=True)
class FreeResources:
    """Resources of a node that a run could have."""

    cpus: float
    gpus: float


def stale(heard_at: Mapping[str, float], now: float, *, timeout_s: float) -> list[str]:
    """Return the uids of the runs whose driver has not been heard for ``timeout_s``; ``heard_at`` has them by uid."""
    return [uid for uid, at in heard_at.items() if now - at > timeout_s]


def line(entries: Iterable[QueueEntry]) -> list[QueueEntry]:
    """Return the runs without workers, in the order in which they may acquire theirs."""
    return sorted(
        (e for e in entries if e.state in ("waiting", "reserving")),
        key=lambda e: (-e.priority, e.over_share, e.submitted_at, e.uid),
    )


def marked_unfit(entries: Iterable[QueueEntry], nodes: Mapping[str, NodeResources]) -> list[QueueEntry]:
    """Return the entries; a run without workers is ``unfit`` if the whole cluster is too small for it.

    Such a run is not in the line, so that it blocks nobody. A cluster that adds nodes is never too small.
    """
    whole = {node_id: FreeResources(node.cpus, node.gpus) for node_id, node in nodes.items()}
    return [e if e.has_workers or e.autoscaling or _fits(e, whole) else replace(e, state="unfit") for e in entries]


def marked_over_share(entries: Collection[QueueEntry], nodes: Mapping[str, NodeResources]) -> list[QueueEntry]:
    """Return the entries; one that waits is ``over_share`` if the runs of its user have ``user_share`` of the nodes.

    That is, of the CPUs, or of the GPUs if it needs any.
    """
    nothing = {node_id: FreeResources(0.0, 0.0) for node_id in nodes}
    cpus, gpus = sum(node.cpus for node in nodes.values()), sum(node.gpus for node in nodes.values())

    def has_share(entry: QueueEntry, share: float) -> bool:
        held = _add(nothing, (e for e in entries if e.user == entry.user and e.uid != entry.uid)).values()
        of_cpus = sum(free.cpus for free in held) / cpus if cpus else 0.0
        of_gpus = sum(free.gpus for free in held) / gpus if gpus and entry.gpus_per_worker else 0.0
        return max(of_cpus, of_gpus) >= share - 1 / UNITS

    return [
        replace(e, over_share=e.state == "waiting" and e.user_share is not None and has_share(e, e.user_share))
        for e in entries
    ]


def why_waiting(entry: QueueEntry, state: ClusterState, *, now: float) -> str:
    """Return why a run without workers has none, as one sentence; ``now`` is in seconds since the epoch."""
    each = {name: need for name, need in _needs(entry).items() if need}
    request = Request(count=entry.workers, each=each, one_node=entry.one_node)
    placing = entry.state == "reserving"
    if_free = STARTING if placing else "there is room, but another run goes first"
    return explain(request, state, autoscaling=entry.autoscaling, now=now, if_free=if_free)


def unreserved_by_node(nodes: Mapping[str, NodeResources], entries: Iterable[QueueEntry]) -> dict[str, FreeResources]:
    """Return what is free on each node.

    This is what Ray reports, but not more than what the runs in the queue leave: Ray's report may be late.
    """
    taken = _add({node_id: FreeResources(0.0, 0.0) for node_id in nodes}, entries)
    return {
        node_id: FreeResources(
            cpus=min(node.free_cpus, node.cpus - taken[node_id].cpus),
            gpus=min(node.free_gpus, node.gpus - taken[node_id].gpus),
        )
        for node_id, node in nodes.items()
    }


def may_reserve(entry: QueueEntry, entries: Collection[QueueEntry], free: Mapping[str, FreeResources]) -> bool:
    """Return whether a run may acquire its workers: beside the runs that do so already, they all fit in any case.

    It is the first that waits, or one that overtakes: the first one could not start even if all made room that have to
    make room for it, and so will this run. The first one need not fit if no other run has workers or reserves them,
    because then nothing in the queue would change that, and if the cluster adds nodes. A run that reserves already
    keeps its turn until one could start for which it makes room, unless both fit.
    """
    others = [e for e in entries if e.uid != entry.uid]
    in_line = line(entries)
    reserving = [e for e in in_line if e.state == "reserving"]
    first = next((e for e in in_line if e.state == "waiting" or e.uid == entry.uid), entry)
    if entry.state == "reserving":
        gives_way = first.uid != entry.uid and _makes_room(entry, first) and _is_due(first, entries, free)
        return not gives_way or _fit_together([*reserving, first], free)
    fits = _fit_together([*reserving, entry], free)
    if first.uid != entry.uid:
        return fits and not _is_due(first, entries, free)
    if fits or reserving:
        return fits
    if entry.autoscaling:
        return not victims(entries, free) and not any(e.state == "yielding" for e in others)
    return not any(e.has_workers for e in others)


def victims(entries: Collection[QueueEntry], free: Mapping[str, FreeResources]) -> list[QueueEntry]:
    """Return the runs that must make room for the first one in the line.

    These are runs that have overtaken it or have a lower priority, the lowest and then the youngest first, and no more
    of them than needed. None if those that are leaving already suffice, or if all of them together would not.
    """
    waiting = line(entries)
    if not waiting or waiting[0].state == "reserving":
        return []
    first = waiting[0]
    leaving = [e for e in entries if e.state == "yielding" or (e.state == "reserving" and _makes_room(e, first))]
    free = _add(free, leaving)
    possible = [e for e in entries if e.state == "running" and _makes_room(e, first)]
    possible.sort(key=lambda e: (e.priority, -e.submitted_at, e.uid))
    if _fits(first, free) or not _fits(first, _add(free, possible)):
        return []
    chosen = possible
    for entry in reversed(possible):
        others = [e for e in chosen if e is not entry]
        if _fits(first, _add(free, others)):
            chosen = others
    return chosen


def find_entries(entries: Iterable[QueueEntry], text: str) -> list[QueueEntry]:
    """Return the runs that ``text`` names, by their name, their id, their directory or the last parts of it."""
    wanted = text.rstrip("/")
    return [
        e for e in entries if wanted in (e.name, e.id, e.label) or f"/{e.location}".endswith(f"/{wanted.lstrip('/')}")
    ]


def namesakes(entry: QueueEntry, entries: Iterable[QueueEntry]) -> tuple[str, ...]:
    """Return the uids of the other runs with the name of this one. The runs of a sweep may share theirs."""
    return tuple(
        e.uid
        for e in entries
        if e.name == entry.name and e.uid != entry.uid and (e.sweep is None or e.sweep != entry.sweep)
    )


def _add(free: Mapping[str, FreeResources], entries: Iterable[QueueEntry]) -> dict[str, FreeResources]:
    """Return ``free`` with the resources of the workers that these runs have."""
    total = dict(free)
    for entry in entries:
        for node_id, workers in entry.workers_by_node.items():
            if (before := total.get(node_id)) is not None:  # otherwise the node is gone
                total[node_id] = FreeResources(
                    before.cpus + workers * entry.cpus_per_worker, before.gpus + workers * entry.gpus_per_worker
                )
    return total


def _makes_room(entry: QueueEntry, other: QueueEntry) -> bool:
    """Return whether a run releases its workers as soon as the other one could start with their resources."""
    return entry.priority < other.priority or other.uid in entry.overtook


def _is_due(first: QueueEntry, entries: Iterable[QueueEntry], free: Mapping[str, FreeResources]) -> bool:
    """Return whether the first run in the line starts now, or as soon as others have made room for it."""
    others = [e for e in entries if e.uid != first.uid]
    if first.autoscaling or not any(e.has_workers or e.state == "reserving" for e in others):
        return True
    return _fits(first, _add(free, (e for e in others if e.state == "yielding" or _makes_room(e, first))))


def _fits(entry: QueueEntry, free: Mapping[str, FreeResources]) -> bool:
    return workers_on_nodes(_needs(entry), _nodes(entry, free), one_node=entry.one_node) >= entry.workers


def _fit_together(entries: Collection[QueueEntry], free: Mapping[str, FreeResources]) -> bool:
    """Return whether there is room for what these runs lack, wherever Ray places their workers."""
    return all(_fits_beside(e, [other for other in entries if other.uid != e.uid], free) for e in entries)


def _fits_beside(entry: QueueEntry, others: Collection[QueueEntry], free: Mapping[str, FreeResources]) -> bool:
    """Return whether there is room for what a run lacks once the ``others`` have what they may take, in any place."""
    if (lacks := entry.workers - sum(entry.workers_by_node.values())) <= 0:
        return True
    needs, nodes = _needs(entry), _nodes(entry, free)
    taken = {name: sum(_may_take(other) * _needs(other)[name] for other in others) for name in needs}
    whole = [workers_on_node(needs, node) for node in nodes]
    with_all_others = [workers_on_node(needs, {name: node[name] - taken[name] for name in needs}) for node in nodes]
    if entry.one_node:
        spoilt = sum(1 if other.one_node else _may_take(other) for other in others)
        return max(with_all_others, default=0) >= lacks or sum(found >= lacks for found in whole) > spoilt
    displaced = sum(_may_take(other) * _displaced(other, needs) for other in others)
    return max(sum(with_all_others), sum(whole) - displaced) >= lacks


def _displaced(other: QueueEntry, needs: Mapping[str, float]) -> int:
    """Return how many workers with these ``needs`` have no room at most because of a worker of another run."""
    return max(math.ceil(_needs(other)[name] / need) for name, need in needs.items() if need)


def _may_take(entry: QueueEntry) -> int:
    """Return how many more workers a run may reserve resources for."""
    return max(0, max(entry.workers, entry.most_workers) - sum(entry.workers_by_node.values()))


def _needs(entry: QueueEntry) -> dict[str, float]:
    return {"CPU": entry.cpus_per_worker, "GPU": entry.gpus_per_worker}


def _nodes(entry: QueueEntry, free: Mapping[str, FreeResources]) -> list[dict[str, float]]:
    return [{"CPU": node.cpus, "GPU": node.gpus} for node_id, node in free.items() if node_id not in entry.avoids]
