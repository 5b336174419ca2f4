"""Why there is no room for workers, from what the nodes of a cluster have and who holds it. Pure."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.config.text import first_few
from orchestrator.planning.mesh import UNITS, Resources, workers_on_node, workers_on_nodes

STARTING = "there is room, and Ray starts their processes"
MAX_NODES_LISTED = 4
MAX_HOLDERS_LISTED = 3
_DAY_S = 24 * 60 * 60
_TOLERANCE = 1 / UNITS


@dataclass(frozen=True, kw_only=True)
class Request:
    """``count`` workers with ``each`` to reserve; all on ``one_node``, or on any."""

    count: int
    each: Resources
    one_node: bool = False

    def __str__(self) -> str:
        return f"{self.count} x {{{', '.join(f'{name}: {amount:g}' for name, amount in self.each.items())}}}"


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """A living node. ``trouble`` says why nothing can be placed there; empty if it can."""

    node_id: str
    name: str
    address: str
    total: Resources
    free: Resources
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What a ``holder`` has reserved on a node; ``since`` is in seconds since the epoch."""

    node_id: str
    holder: str
    resources: Resources
    since: float


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """What the nodes of a cluster have, and who holds it, at one moment."""

    nodes: Sequence[NodeState]
    holdings: Sequence[Holding] = ()


def room(request: Request, state: ClusterState) -> int:
    """Return how many of the requested workers could be placed at once."""
    usable = [node.free for node in state.nodes if not node.trouble]
    return workers_on_nodes(request.each, usable, one_node=request.one_node)


def can_ever_fit(request: Request, state: ClusterState) -> bool:
    """Return whether the nodes on which something can be placed have room for the request while nothing else runs."""
    return _capacity(request, state) >= request.count


def explain(
    request: Request,
    state: ClusterState,
    *,
    autoscaling: bool,
    now: float,
    if_free: str = STARTING,
) -> str:
    """Return why the request is not granted, as one sentence of limited length.

    Args:
        autoscaling: whether nodes may be added.
        now: seconds since the epoch.
        if_free: what the request waits for if there is room for it.
    """
    free = room(request, state)
    if free >= request.count and can_ever_fit(request, state):
        return if_free
    parts = [f"need {request}{' on one node' if request.one_node else ''}", f"free {free}"]
    if not can_ever_fit(request, state):
        shortage = f"the cluster has room for {_capacity(request, state)} in all"
        if autoscaling:
            parts.append(f"{shortage}; more nodes are awaited (cluster.autoscaling=true)")
        else:
            parts.append(f"{shortage}: add nodes, or lower strategy.num_workers or cluster.cpus_per_worker")
    occupied = sorted(
        (node for node in state.nodes if _occupied(request.each, node)),
        key=lambda node: -_occupied(request.each, node),
    )
    holdings = defaultdict(list)
    for holding in state.holdings:
        holdings[holding.node_id].append(holding)
    held = [_describe(node, request.each, holdings[node.node_id], now) for node in occupied]
    return first_few([*parts, *held], len(parts) + MAX_NODES_LISTED, separator="; ", noun="nodes")


def _capacity(request: Request, state: ClusterState) -> int:
    usable = [node.total for node in state.nodes if not node.trouble]
    return workers_on_nodes(request.each, usable, one_node=request.one_node)


def _occupied(each: Resources, node: NodeState) -> int:
    """Return how many workers the node has no room for although it is large enough."""
    return workers_on_node(each, node.total) - (0 if node.trouble else workers_on_node(each, node.free))


def _describe(node: NodeState, each: Resources, holdings: Sequence[Holding], now: float) -> str:
    """Return who holds what is scarce on a node, which has these ``holdings``."""
    where = f"node {node.name} ({node.address})"
    if node.trouble:
        return f"{where} {node.trouble}"
    scarce = min(each, key=lambda name: (workers_on_node({name: each[name]}, node.free), name != "GPU"))
    unit = f" {scarce}s" if node.total[scarce] != 1 else f" {scarce}"
    held = node.total[scarce] - node.free.get(scarce, 0.0)
    text = f"{where}: {held:g} of {node.total[scarce]:g}{unit} held"
    holders = _holders(scarce, holdings, held, now)
    if len(holders) == 1:
        return f"{text} by {holders[0][1]}"
    return f"{text}, {', '.join(f'{amount:g} by {who}' for amount, who in holders)}"


def _holders(name: str, holdings: Sequence[Holding], held: float, now: float) -> list[tuple[float, str]]:
    """Return how much of a resource each holder has on a node: those with the most, and all others together."""
    amounts: dict[str, float] = {}
    since: dict[str, float] = {}
    for holding in holdings:
        if amount := holding.resources.get(name, 0.0):
            amounts[holding.holder] = amounts.get(holding.holder, 0.0) + amount
            since[holding.holder] = min(since.get(holding.holder, now), holding.since)
    named = sorted(amounts, key=lambda holder: -amounts[holder])[:MAX_HOLDERS_LISTED]
    listed = [(amounts[holder], f"{holder} since {_clock(since[holder], now)}") for holder in named]
    rest = held - sum(amount for amount, _ in listed)
    return (
        [*listed, (rest, "others" if len(amounts) > len(named) else "other Ray tasks")] if rest > _TOLERANCE else listed
    )


def _clock(since: float, now: float) -> str:
    form = "%H:%M" if now - since < _DAY_S else "%b %d %H:%M"
    return time.strftime(form, time.localtime(since))
