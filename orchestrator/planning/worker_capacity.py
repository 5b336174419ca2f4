"""How many workers fit on nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Resources = Mapping[str, float]
"""Amounts by the names that Ray uses: ``CPU``, ``GPU``, ..."""

UNITS = 10_000
"""Ray counts resources in units of 1/10000. In floating point, 1.0 // 0.1 is 9."""


def workers_on_node(each: Resources, available: Resources) -> int:
    """Return how many workers fit on a node.

    Args:
        each: the needs of one worker, some of which are positive; a need of 0 limits nothing.
        available: the resources of the node; what is missing there is 0.
    """
    needs = {name: amount for name, amount in each.items() if amount > 0}
    return min(max(0, _units(available.get(name, 0.0))) // max(1, _units(need)) for name, need in needs.items())


def workers_on_nodes(each: Resources, nodes: Iterable[Resources], *, one_node: bool = False) -> int:
    """Return how many workers fit on nodes with these resources: all on ``one_node``, or on any."""
    by_node = [workers_on_node(each, available) for available in nodes]
    return max(by_node, default=0) if one_node else sum(by_node)


def _units(amount: float) -> int:
    return round(amount * UNITS)
