"""Where a tensor of the model is: which part of it each worker of a mesh has. Pure, no torch.

Who has a tensor's shard, how many do, who saves it, and over whom its gradient is summed all follow from its placement.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from orchestrator.planning.boxes import Box, Shape
from orchestrator.planning.mesh import DIMENSIONS, TOKENS, Axes, Dimension, Mesh, several


@dataclass(frozen=True, kw_only=True)
class AxisCut:
    """A division of a tensor along one of its axes.

    Attributes:
        over: the dimensions of the mesh whose workers have a shard each, in the order of the last one fastest.
        axis: the axis of the tensor.
        sizes: the number of places along the axis that each of these workers has, in their order; empty for equal
            shards, as :meth:`Box.shard` makes them.
        packed: the sizes of what follows one another along the axis, such as queries, keys and values, if a worker has
            an equal part of each; empty for one.
    """

    over: Dimension | Axes
    axis: int = 0
    sizes: tuple[int, ...] = ()
    packed: tuple[int, ...] = ()

    def box(self, shape: Shape, *, index: int, count: int) -> Box:
        """Return the shard of a tensor of this ``shape`` that the worker number ``index`` of ``count`` has."""
        if self.packed:
            starts = itertools.accumulate(self.packed, initial=0)
            parts = zip(starts, (size // count for size in self.packed), strict=False)
            return Box.cut(shape, axis=self.axis, places=[(start + index * size, size) for start, size in parts])
        if not self.sizes:
            return Box.shard(shape, index, count, axis=self.axis)
        return Box.cut(shape, axis=self.axis, places=[(sum(self.sizes[:index]), self.sizes[index])])


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one tensor is.

    Attributes:
        shape: of the whole tensor.
        cuts: how it is divided, the outer one first. Along the other dimensions of a mesh, all workers have the same.
        stages: the places along ``pipeline`` that have it, that of the first stage first.
        partial: the dimensions along which all workers have it and each computes a part of its gradient.
    """

    shape: Shape
    cuts: tuple[AxisCut, ...] = ()
    stages: tuple[int, ...] = (0,)
    partial: Axes = ()

    def box(self, mesh: Mesh, rank: int) -> Box | None:
        """Return what of the tensor a rank has; None if it has nothing of it, as servers and other stages."""
        coords = mesh.coords(rank)
        if rank in mesh.servers or coords.pipeline not in self.stages:
            return None
        box = Box.whole(self.shape)
        for cut in self.cuts:
            index, count = mesh.place(cut.over, rank)
            box = cut.box(box.shape, index=index, count=count).within(box)
        return box

    def holders(self, mesh: Mesh, rank: int) -> list[int]:
        """Return the ranks that have the same of the tensor as ``rank``, in ascending order; none if it has nothing."""
        if self.box(mesh, rank) is None:
            return []
        alike = mesh.group(("pipeline", *self.held_along), rank)
        return sorted(other for other in alike if mesh.coords(other).pipeline in self.stages)

    def copies(self, mesh: Mesh) -> int:
        """Return how many workers have each element of the tensor."""
        return math.prod(mesh.size(dimension) for dimension in self.held_along) * len(self.stages)

    def saves(self, mesh: Mesh, rank: int) -> bool:
        """Return whether ``rank`` is the one of its holders that saves what they have."""
        coords = mesh.coords(rank)
        first = coords.pipeline == self.stages[0] and not any(getattr(coords, d) for d in self.held_along)
        return first and rank not in mesh.servers

    @property
    def summed_over(self) -> Axes:
        """The dimensions whose workers have other gradients, as of other tokens, for the same elements."""
        return tuple(dimension for dimension in self.held_along if dimension in (*TOKENS, *self.partial))

    @property
    def held_along(self) -> Axes:
        """The dimensions along which the workers of a stage have the same of the tensor."""
        cut = {"pipeline", *(dimension for cut in self.cuts for dimension in several(cut.over))}
        return tuple(dimension for dimension in DIMENSIONS if dimension not in cut)
