"""Where a tensor of the model is: which part of it each worker of a mesh has. Pure, no torch.

A part that ranks hold and files store is a :class:`Box`.

Who has a tensor's shard, how many do, who saves it, and over whom its gradient is summed all follow from its placement.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

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


Shape = tuple[int, ...]
Ranges = tuple[tuple[int, int], ...]
"""Places along a dimension: the first one and the number of each range, in ascending order, with gaps between them."""
Index = tuple[slice | list[int], ...]
"""Indexes a tensor, for some of its places along each of its dimensions."""


def is_divisible(shape: Sequence[int]) -> bool:
    """Return whether a tensor of this shape has elements along a dimension, which several ranks may divide."""
    return len(shape) > 0 and math.prod(shape) > 0


@dataclass(frozen=True, kw_only=True)
class Box:
    """A part of a tensor: some places in each dimension, which are one range of them, or in one dimension several.

    Attributes:
        full: the shape of the whole tensor.
        ranges: the places in each dimension.
    """

    full: Shape
    ranges: tuple[Ranges, ...]

    @classmethod
    def at(cls, *, full: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> Box:
        """Return the box with the first place, and the number of places, in each dimension."""
        return cls(full=tuple(full), ranges=tuple((place,) for place in zip(offset, shape, strict=True)))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor."""
        return cls.at(full=shape, offset=(0,) * len(shape), shape=shape)

    @classmethod
    def shard(cls, shape: Sequence[int], index: int, count: int, *, axis: int = 0) -> Box:
        """Return the part of a tensor that one of ``count`` ranks holds if all divide it along one axis.

        All parts are equal but for the last ones, which may be smaller or empty, as ``torch.chunk`` makes them.
        """
        size = shape[axis]
        most = -(-size // count)
        start = min(index * most, size)
        return cls.cut(shape, axis=axis, places=[(start, min(most, size - start))])

    @classmethod
    def cut(cls, shape: Sequence[int], *, axis: int, places: Iterable[tuple[int, int]]) -> Box:
        """Return the part of a tensor that has ranges of places along one axis, and all in the others."""
        whole = cls.whole(shape)
        return replace(whole, ranges=(*whole.ranges[:axis], _joined(places), *whole.ranges[axis + 1 :]))

    @property
    def offset(self) -> Shape:
        """The first place in each dimension."""
        return tuple(ranges[0][0] for ranges in self.ranges)

    @property
    def shape(self) -> Shape:
        """The number of places in each dimension."""
        return tuple(sum(size for _, size in ranges) for ranges in self.ranges)

    @property
    def is_whole(self) -> bool:
        """Whether the box is the whole tensor."""
        return self.shape == self.full

    @property
    def end(self) -> Shape:
        """The place after the last one, in each dimension."""
        return tuple(sum(ranges[-1]) for ranges in self.ranges)

    def __str__(self) -> str:
        """The box as in an indexing expression, such as ``[0:4, 2:6]``; ``[0:2+4:6]`` has two ranges."""
        axes = ("+".join(f"{start}:{start + size}" for start, size in ranges) for ranges in self.ranges)
        return f"[{', '.join(axes)}]"

    def overlap(self, other: Box) -> Box | None:
        """Return the part that both have of one tensor; None if that is empty."""
        common = tuple(_common(own, of_other) for own, of_other in zip(self.ranges, other.ranges, strict=True))
        return Box(full=self.full, ranges=common) if all(common) else None

    def within(self, outer: Box) -> Box:
        """Return the part that this one, of a tensor with the values of ``outer``, is of the tensor of ``outer``."""
        axes = zip(self.ranges, outer.ranges, strict=True)
        return Box(full=outer.full, ranges=tuple(_moved(own, _numbers(places), places) for own, places in axes))

    def slices_in(self, outer: Box) -> Index:
        """Return how to index a tensor that has the values of ``outer``, which contains this box, for this box.

        An axis of several ranges is indexed by a list of places, so that the result is a copy.
        """
        return tuple(
            slice(found[0][0], sum(found[0])) if len(found) == 1 else [*itertools.chain(*map(_places, found))]
            for found in self._ranges_in(outer)
        )

    def runs_in(self, outer: Box) -> Iterator[tuple[int, int]]:
        """Yield where this box is in the contiguous memory of ``outer``: the first element and the length of each run.

        The runs are in the order of the elements of this box, and as long as possible.
        """
        sizes, axes = outer.shape, len(self.full)
        while axes > 0 and self.shape[axes - 1] == sizes[axes - 1]:
            axes -= 1
        if axes == 0:
            yield 0, math.prod(sizes)
            return
        strides = [math.prod(sizes[i + 1 :]) for i in range(axes)]
        *leading, last = self._ranges_in(outer)[:axes]
        for places in itertools.product(*(itertools.chain(*map(_places, ranges)) for ranges in leading)):
            first = sum(place * stride for place, stride in zip(places, strides, strict=False))
            for start, size in last:
                yield first + start * strides[-1], size * strides[-1]

    def _ranges_in(self, outer: Box) -> list[Ranges]:
        """Return where this box is in the tensor that has the values of ``outer``."""
        axes = zip(self.ranges, outer.ranges, strict=True)
        return [_moved(own, places, _numbers(places)) for own, places in axes]


def _places(places: tuple[int, int]) -> range:
    return range(places[0], sum(places))


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ascending ranges, those without a gap between them as one."""
    joined: list[tuple[int, int]] = []
    for start, size in ranges:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + size
        else:
            joined.append((start, size))
    return tuple(joined)


def _common(one: Ranges, other: Ranges) -> Ranges:
    """Return the places that are in both; none if there are none."""
    pairs = ((max(a, b), min(a + m, b + n)) for a, m in one for b, n in other)
    return tuple((start, end - start) for start, end in pairs if end > start)


def _numbers(ranges: Ranges) -> Ranges:
    """Return the numbers of places, counted through all ranges."""
    sizes = [size for _, size in ranges]
    return tuple(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False))


def _moved(places: Ranges, sources: Ranges, targets: Ranges) -> Ranges:
    """Return where ``places`` are after each of the ``sources`` that they are in has moved to its target."""
    found = (
        (start - source[0] + target[0], size)
        for source, target in zip(sources, targets, strict=True)
        for start, size in _common(places, (source,))
    )
    return _joined(found) or ((0, 0),)


def box_problem(box: Box) -> str | None:
    """Return why a box cannot be one, as a predicate; None if it can."""
    if len(box.full) != len(box.ranges):
        return f"has {len(box.ranges)} dimensions in a tensor of {len(box.full)}"
    if not all(start >= 0 and end <= size for start, end, size in zip(box.offset, box.end, box.full, strict=True)):
        return f"{box} is outside of its tensor of shape {list(box.full)}"
    if any(start <= sum(before) for ranges in box.ranges for before, (start, _) in itertools.pairwise(ranges)):
        return f"{box} has ranges without a gap between them"
    return None


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the indices of two boxes of one tensor that overlap; None if no two do."""
    if not boxes or not boxes[0].full:
        return (0, 1) if len(boxes) > 1 else None
    # Along the dimension that is cut most often, a box overlaps few others.
    axis = max(range(len(boxes[0].full)), key=lambda a: len({box.offset[a] for box in boxes}))
    open_boxes: list[int] = []
    for index in sorted(range(len(boxes)), key=lambda i: boxes[i].offset[axis]):
        box = boxes[index]
        open_boxes = [i for i in open_boxes if boxes[i].end[axis] > box.offset[axis]]
        for other in open_boxes:
            if box.overlap(boxes[other]) is not None:
                return min(other, index), max(other, index)
        open_boxes.append(index)
    return None


def has_hole(boxes: Sequence[Box]) -> bool:
    """Return whether boxes of one tensor that do not overlap leave a part of it out."""
    return sum(math.prod(box.shape) for box in boxes) < math.prod(boxes[0].full)
