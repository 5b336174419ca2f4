"""What the nodes of the cluster have, and who holds it, as Ray knows it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from orchestrator.compat.ray.cluster import all_nodes, free_resources, placed_actors, placed_bundles
from orchestrator.policy.shortage import ClusterState, Holding, NodeState

_OF_RUN = re.compile(r"(?P<run>.+)/\d+")
"""The name that :class:`~orchestrator.driver.gang.slots.Slots` gives a placement group."""


def cluster_state(*, own_label: str = "", trouble: Mapping[str, str] | None = None) -> ClusterState:
    """Return the state of the living nodes.

    Args:
        own_label: begins the names of this run's own placement groups; empty if it has none.
        trouble: why nothing can be placed on some nodes, by node id; None if nothing is known about that.
    """
    free = free_resources()
    nodes = [
        NodeState(
            node_id=(node_id := n.node_id.hex()),
            name=n.node_manager_hostname,
            address=n.node_manager_address,
            total=dict(n.resources_total),
            free=free.get(node_id, {}),
            trouble=(trouble or {}).get(node_id, ""),
        )
        for n in all_nodes()
        if n.state == n.ALIVE
    ]
    holdings = [
        Holding(
            node_id=bundle.node_id,
            holder=_holder(bundle.group, own_label),
            resources=bundle.resources,
            since=bundle.placed_at,
        )
        for bundle in placed_bundles()
    ]
    holdings += [
        Holding(
            node_id=actor.node_id,
            holder=f"Ray job {actor.job}",
            resources=actor.resources,
            since=actor.started_at,
        )
        for actor in placed_actors()
    ]
    return ClusterState(nodes=nodes, holdings=holdings)


def _holder(group: str, own_label: str) -> str:
    """Return who has reserved the placement group with this name, as shown to users."""
    if (match := _OF_RUN.fullmatch(group)) is None:
        return f"placement group {group}" if group else "an unnamed placement group"
    return "this run" if match["run"] == own_label else f"run {match['run']}"
