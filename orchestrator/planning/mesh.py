"""The grid of ranks, even shares of the batch over it, and how many workers fit on nodes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

Dimension = Literal["pipeline", "replicate", "shard", "context", "tensor"]
Axes = tuple[Dimension, ...]


class Coords(NamedTuple):
    """The position of a rank in each dimension of a mesh."""

    pipeline: int = 0
    replicate: int = 0
    shard: int = 0
    context: int = 0
    tensor: int = 0


DIMENSIONS = cast(Axes, Coords._fields)
"""From the outermost to the innermost: consecutive ranks differ in the last of them."""
BATCH: Axes = ("replicate", "shard")
"""The dimensions whose workers train on different samples."""
TOKENS: Axes = (*BATCH, "context")
"""The dimensions whose workers train on different tokens."""
DENSE: Axes = ("shard", "context")
"""The dimensions over which parameters are divided that are gathered to be used."""
DIVIDING: Axes = (*DENSE, "tensor")
"""The dimensions whose workers may have shards of the same tensor."""
TOGETHER: Axes = DIMENSIONS[3:]
"""The dimensions whose workers compute the same samples together."""
WITHIN_STAGE: Axes = DIMENSIONS[1:]
"""The dimensions whose workers have the same layers."""

_FORMER_NAMES = {
    "data_parallel_size": "replicate",
    "pipeline_parallel_size": "pipeline",
    "num_shards": "num_servers",
}
"""The names of the fields in the records of earlier versions."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The grid of workers, followed by servers that hold parameters for them.

    Attributes:
        pipeline: the number of workers that the layers of the model are divided over.
        replicate: the number of copies of each parameter; each copy trains on a part of the batch.
        shard: the number of workers that the parameters are divided over; each trains on a part of the batch.
        context: the number of workers that the positions of a sample are divided over.
        tensor: the number of workers that the dimensions of a parameter are divided over.
        replicas_close: whether ``pipeline`` is the outermost dimension, so that the replicas of a stage are consecutive
            ranks. By default ``replicate`` is, and the workers of a replica are.
        num_servers: the number of ranks after the workers that hold parameters.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    replicas_close: bool = False
    num_servers: int = 0

    @property
    def num_workers(self) -> int:
        """The number of ranks that train."""
        return math.prod(map(self.size, DIMENSIONS))

    @property
    def world_size(self) -> int:
        """The number of workers and servers."""
        return self.num_workers + self.num_servers

    @property
    def data_parallel_size(self) -> int:
        """The number of parts of the batch."""
        return self.replicate * self.shard

    @property
    def workers_per_sample(self) -> int:
        """The number of workers that have the same layers and compute the same samples together."""
        return math.prod(map(self.size, TOGETHER))

    @property
    def num_shards(self) -> int:
        """The number of workers that a parameter is divided over which is gathered to be used."""
        return self.shard * self.context

    @property
    def servers(self) -> range:
        """The global ranks that hold parameters."""
        return range(self.num_workers, self.world_size)

    def server(self, global_rank: int) -> int | None:
        """Return the index of the server on ``global_rank``; None if the rank is a worker."""
        return global_rank - self.num_workers if global_rank in self.servers else None

    def coords(self, global_rank: int) -> Coords:
        """Return the position of ``global_rank`` in the grid; rank 0's for a server, which is outside of it."""
        if global_rank in self.servers:
            return Coords()
        found: dict[str, int] = {}
        for dimension in reversed(self._order):
            global_rank, found[dimension] = divmod(global_rank, self.size(dimension))
        return Coords(**found)

    def group(self, axes: Dimension | Axes, global_rank: int) -> list[int]:
        """Return the ranks that differ from a worker's at most in ``axes``, ordered by these, the last one fastest."""
        own, axes = self.coords(global_rank), several(axes)
        places = itertools.product(*(range(self.size(dimension)) for dimension in axes))
        return [self._rank(own._replace(**dict(zip(axes, place, strict=True)))) for place in places]

    def groups(self, axes: Dimension | Axes) -> list[list[int]]:
        """Return the groups of all workers along ``axes``, in the order of their places in the other dimensions."""
        axes = several(axes)
        places = (range(1 if other in axes else self.size(other)) for other in DIMENSIONS)
        return [self.group(axes, self._rank(Coords(*first))) for first in itertools.product(*places)]

    def place(self, axes: Dimension | Axes, global_rank: int) -> tuple[int, int]:
        """Return the index of a worker in its :meth:`group` along ``axes``, and the number of its workers."""
        group = self.group(axes, global_rank)
        return group.index(global_rank), len(group)

    def part(self, global_rank: int) -> Coords:
        """Return the coordinates that identify a worker's part of the model: all but ``replicate``."""
        return self.coords(global_rank)._replace(replicate=0)

    @property
    def is_divided(self) -> bool:
        """Whether no worker has the whole model and all of its training state."""
        return self.num_workers > self.replicate

    @property
    def divides_tensors(self) -> bool:
        """Whether workers have shards of tensors, or of their training state."""
        return self.num_workers > self.replicate * self.pipeline

    def has_parts_of(self, other: Mesh) -> bool:
        """Return whether two meshes divide the model in the same way, and differ in its replicas alone."""
        return all(self.size(d) == other.size(d) for d in DIMENSIONS if d != "replicate")

    @property
    def neighbours_along(self) -> Dimension:
        """The dimension along which workers have different parts, so that each may keep a copy of its neighbour's."""
        return next((d for d in DIMENSIONS if d != "replicate" and self.size(d) > 1), "shard")

    @property
    def replicas(self) -> list[list[int]]:
        """The groups of workers that have all parameters together."""
        found: list[list[int]] = [[] for _ in range(self.replicate)]
        for rank in range(self.num_workers):
            found[self.coords(rank).replicate].append(rank)
        return found

    def dp_rank(self, global_rank: int) -> int:
        """Return the index of the part of the batch that ``global_rank`` reads; 0 for a server, which reads none."""
        coords = self.coords(global_rank)
        return coords.replicate * self.shard + coords.shard

    def seed_rank(self, global_rank: int) -> int:
        """Return a number that is equal on the ranks which compute the same layers of the same samples together."""
        if global_rank in self.servers:
            return global_rank
        sizes, places = dict.fromkeys(TOGETHER, 1), dict.fromkeys(TOGETHER, 0)
        return dataclasses.replace(self, **sizes)._rank(self.coords(global_rank)._replace(**places))  # type: ignore[arg-type]

    @property
    def close_groups(self) -> list[list[int]]:
        """The groups of ranks that should share a node: replicas, or with ``replicas_close`` the workers of a stage.

        Consecutive ranks, in ascending order.
        """
        size = self.num_workers // (self.pipeline if self.replicas_close else self.replicate)
        return [list(range(first, first + size)) for first in range(0, self.num_workers, size)]

    def size(self, dimension: Dimension) -> int:
        """Return the number of places in ``dimension``."""
        found: int = getattr(self, dimension)
        return found

    def distance(self, dimension: Dimension) -> int:
        """Return how far apart the ranks are that are neighbours in ``dimension``."""
        return math.prod(map(self.size, self._order[self._order.index(dimension) + 1 :]))

    @property
    def _order(self) -> Axes:
        return DIMENSIONS if self.replicas_close else ("replicate", "pipeline", *DIMENSIONS[2:])

    def _rank(self, coords: Coords) -> int:
        rank = 0
        for dimension in self._order:
            rank = rank * self.size(dimension) + getattr(coords, dimension)
        return rank


def several(axes: Dimension | Axes) -> Axes:
    """Return the dimensions that are meant by one or by several."""
    return (axes,) if isinstance(axes, str) else axes


def recorded_mesh(record: Mapping[str, Any]) -> Mesh:
    """Return the mesh in the plan of a run, as this or an earlier version has recorded it.

    Raises:
        TypeError, ValueError: it is not a mapping.
    """
    named = {_FORMER_NAMES.get(key, key): value for key, value in dict(record).items()}
    known: dict[str, Any] = {f.name: named[f.name] for f in dataclasses.fields(Mesh) if f.name in named}
    return Mesh(**known)


def even_shares(total: int, parts: int) -> tuple[int, ...]:
    """Divide ``total`` into ``parts`` sizes that differ by at most one, the larger ones first."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def share_sizes(total: int, parts: int) -> set[int]:
    """Return the sizes that occur in :func:`even_shares`, without listing all shares."""
    size, rest = divmod(total, parts)
    return {size, size + 1} if rest else {size}


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
