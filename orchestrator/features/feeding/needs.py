"""Whether the tasks and actors that make the data find room beside the workers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Need:
    """What an operator of a dataset reserves on a node.

    Attributes:
        name: the operator, as Ray Data calls it.
        each: the resources of each task or actor.
        actors: how many actors there are at least, as long as data is made; 0 for tasks, which come and go.
    """

    name: str
    each: Resources
    actors: int = 0


def shortage(needs: Sequence[Need], free: Sequence[Resources]) -> str | None:
    """Return what would wait for ever, as a clause; None if everything finds room.

    Args:
        needs: of the operators.
        free: for each node, what no placement group reserves.
    """
    left = [dict(node) for node in free]

    def room(need: Need) -> dict[str, float] | None:
        fitting = (node for node in left if all(node.get(kind, 0.0) >= n for kind, n in need.each.items()))
        return max(fitting, key=lambda node: node.get("CPU", 0.0), default=None)

    actors = sorted((need for need in needs if need.actors), key=lambda need: -need.each.get("CPU", 0.0))
    for need in (n for of_pool in actors for n in [of_pool] * of_pool.actors):
        if (node := room(need)) is None:
            return f"{need.name} keeps actors, {need.actors} of {_text(need.each)}"
        for kind, number in need.each.items():
            node[kind] -= number
    beside = f", beside actors of the data ({sum(need.actors for need in actors)})" if actors else ""
    for need in needs:
        if not need.actors and room(need) is None:
            return f"{need.name} has tasks of {_text(need.each)}{beside}"
    return None


def _text(resources: Resources) -> str:
    return " and ".join(f"{number:g} {kind}" for kind, number in resources.items() if number) or "nothing"
