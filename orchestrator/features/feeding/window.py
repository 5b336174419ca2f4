"""Samples by number: what a feeder has read, cut into shares. Pure, but for references to blocks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from orchestrator.strategies.data.columns import Columns, joined
from orchestrator.strategies.data.datasets import mix

Load = Callable[[Any], Mapping[str, Any]]
"""Returns the columns of a block, given the reference to it."""


class Part(Protocol):
    """A part of a share, small enough to be sent."""

    def load(self, load: Load) -> Sequence[Any]:
        """Return the samples."""


class Chunk(Protocol):
    """Consecutive samples that a source has read.

    Attributes:
        num_bytes: the size of the blocks that are kept for them; infinite if it is not known.
    """

    @property
    def num_bytes(self) -> float: ...

    def __len__(self) -> int: ...

    def part(self, start: int, stop: int) -> Part:
        """Return the samples from ``start`` up to, but not including, ``stop``."""


@dataclass(frozen=True)
class Items:
    """Samples of a stream, which are both a chunk and a part."""

    items: list[Any]
    num_bytes: float = math.inf

    def __len__(self) -> int:
        return len(self.items)

    def part(self, start: int, stop: int) -> Items:
        return Items(self.items[start:stop])

    def load(self, load: Load) -> Sequence[Any]:
        return self.items


@dataclass(frozen=True)
class InBlocks:
    """Rows of blocks: for each block its reference and the numbers of rows; then the order in which they follow."""

    blocks: tuple[tuple[Any, Any], ...]
    order: Any = None

    def load(self, load: Load) -> Sequence[Any]:
        rows: Columns = joined([Columns(load(ref)).rows(chosen) for ref, chosen in self.blocks])
        return rows if self.order is None else rows.rows(self.order)


class Blocks:
    """The rows of consecutive blocks, in their order or in another one.

    Args:
        blocks: the reference, the first row and the number of rows of each.
        order: which row of these blocks comes when, as far as they are wanted; None for all in their own order.
        num_bytes: the size of the blocks.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[Any, int, int]],
        order: np.ndarray[Any, Any] | None = None,
        *,
        num_bytes: float = math.inf,
    ):
        self.num_bytes = num_bytes
        self._blocks = list(blocks)
        self._ends = np.cumsum([rows for _, _, rows in blocks])
        self._order = order

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._order is None else len(self._order)

    def part(self, start: int, stop: int) -> InBlocks:
        wanted = np.arange(start, stop) if self._order is None else self._order[start:stop]
        in_block = np.searchsorted(self._ends, wanted, side="right")
        by_block = np.argsort(in_block, kind="stable")
        found = []
        for number in np.unique(in_block):
            ref, first, rows = self._blocks[number]
            own = wanted[in_block == number] - (self._ends[number] - rows) + first
            found.append((ref, own if self._order is not None else slice(int(own[0]), int(own[-1]) + 1)))
        return InBlocks(tuple(found), None if self._order is None else np.argsort(by_block, kind="stable"))


def shuffled(rows: int, *, seed: int, epoch: int, window: int) -> np.ndarray[Any, Any]:
    """Return the order of the rows of a window, by its number in its epoch."""
    return np.random.Generator(np.random.PCG64(mix(seed, "window", epoch, window))).permutation(rows)


class Window:
    """The chunks from one position to another, of which the oldest are dropped.

    Attributes:
        start, end: the positions of the first sample and after the last one.
        num_bytes: the size of all chunks that have been added.
        kept_bytes: the size of those that are there.
    """

    def __init__(self, start: int):
        self.num_bytes = 0.0
        self.start = self.end = start
        self._chunks: deque[tuple[int, Chunk]] = deque()

    @property
    def kept_bytes(self) -> float:
        return math.fsum(chunk.num_bytes for _, chunk in self._chunks)

    def add(self, start: int, chunk: Chunk) -> None:
        """Add the chunk that begins at position ``start``: where the last one ends, or before the first sample."""
        assert start == self.end or not self._chunks, "chunks follow each other"
        self._chunks.append((start, chunk))
        self.num_bytes += chunk.num_bytes
        self.end = start + len(chunk)

    def chunk_end(self, position: int) -> int:
        """Return the position after the chunk that has the sample at ``position``, or the end."""
        ends = (first + len(chunk) for first, chunk in self._chunks)
        return next((end for end in ends if end > position), self.end)

    def parts(self, start: int, stop: int) -> list[Part]:
        """Return the samples from ``start`` up to, but not including, ``stop``, all of which are there."""
        return [
            chunk.part(max(start, first) - first, min(stop, first + len(chunk)) - first)
            for first, chunk in self._chunks
            if first < stop and first + len(chunk) > start
        ]

    def drop_before(self, position: int) -> None:
        """Drop the chunks that end before ``position``."""
        while self._chunks and self._chunks[0][0] + len(self._chunks[0][1]) <= position:
            self._chunks.popleft()
        self.start = max(self.start, min(position, self.end))
