"""Boxes: the parts of a tensor that ranks hold and files store. Pure functions on shapes and offsets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


def is_divisible(shape: Sequence[int]) -> bool:
    """Return whether a tensor of this shape has elements along a dimension, which several ranks may divide."""
    return len(shape) > 0 and math.prod(shape) > 0


@dataclass(frozen=True, kw_only=True)
class Box:
    """A part of a tensor: a range of places in each dimension.

    Attributes:
        full: the shape of the whole tensor.
        offset: the first place in each dimension.
        shape: the number of places in each dimension.
    """

    full: Shape
    offset: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor."""
        full = tuple(shape)
        return cls(full=full, offset=(0,) * len(full), shape=full)

    @classmethod
    def shard(cls, shape: Sequence[int], index: int, count: int, *, axis: int = 0) -> Box:
        """Return the part of a tensor that one of ``count`` ranks holds if all divide it along one axis.

        All parts are equal but for the last ones, which may be smaller or empty, as ``torch.chunk`` makes them.
        """
        size = shape[axis]
        most = -(-size // count)
        start = min(index * most, size)
        return cls.cut(shape, axis=axis, start=start, size=min(most, size - start))

    @classmethod
    def cut(cls, shape: Sequence[int], *, axis: int, start: int, size: int) -> Box:
        """Return the part of a tensor that has ``size`` places from ``start`` along one axis, and all in the others."""
        full = tuple(shape)
        return cls(
            full=full,
            offset=tuple(start if other == axis else 0 for other in range(len(full))),
            shape=(*full[:axis], size, *full[axis + 1 :]),
        )

    @property
    def is_whole(self) -> bool:
        """Whether the box is the whole tensor."""
        return self.shape == self.full

    @property
    def end(self) -> Shape:
        """The place after the last one, in each dimension."""
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))

    def __str__(self) -> str:
        """The box as in an indexing expression, such as ``[0:4, 2:6]``."""
        return f"[{', '.join(f'{start}:{end}' for start, end in zip(self.offset, self.end, strict=True))}]"

    def overlap(self, other: Box) -> Box | None:
        """Return the part that both have of one tensor; None if that is empty."""
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(end - begin for begin, end in zip(start, map(min, self.end, other.end), strict=True))
        return Box(full=self.full, offset=start, shape=shape) if all(size > 0 for size in shape) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return how to index a tensor that has the values of ``outer``, which contains this box, for this box."""
        starts = [start - first for start, first in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    def runs_in(self, outer: Box) -> Iterator[tuple[int, int]]:
        """Yield where this box is in the contiguous memory of ``outer``: the first element and the length of each run.

        The runs are in the order of the elements of this box, and as long as possible.
        """
        axis, length = len(self.shape), 1
        while axis > 0 and (axis == len(self.shape) or self.shape[axis] == outer.shape[axis]):
            axis -= 1
            length *= self.shape[axis]
        strides = [math.prod(outer.shape[i + 1 :]) for i in range(len(outer.shape))]
        starts = [part.start for part in self.slices_in(outer)]
        first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        for places in itertools.product(*(range(size) for size in self.shape[:axis])):
            yield first + sum(place * stride for place, stride in zip(places, strides, strict=False)), length


def box_problem(box: Box) -> str | None:
    """Return why a box cannot be one, as a predicate; None if it can."""
    if len(box.full) != len(box.shape) or len(box.full) != len(box.offset):
        return f"has {len(box.shape)} dimensions at an offset of {len(box.offset)} in a tensor of {len(box.full)}"
    if not all(start >= 0 and end <= size for start, end, size in zip(box.offset, box.end, box.full, strict=True)):
        return f"{box} is outside of its tensor of shape {list(box.full)}"
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
