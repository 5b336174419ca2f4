"""The samples of a stream of the user, read once for several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from typing import Any

from orchestrator.compat.generators import drawing
from orchestrator.features.feeding.window import Chunk, Items
from orchestrator.strategies.data.datasets import mix
from orchestrator.user_code.errors import error_text
from orchestrator.worker.data.data_loader import DataError
from orchestrator.worker.data.stream import Mark, StreamReader, read_past

MARKS = 64
"""How many of the last places are remembered where the stream can begin."""


class Stream:
    """See :class:`feed.Source`. A rank that reads the stream by itself has the same samples.

    Args:
        open_stream: returns a new stream.
        split: the part of the data.
        seed: of the run.
        count: the samples that are read at once, a global batch.
        repeats: whether an epoch follows the last one.
        limit: the samples of an epoch at most; None for all.
    """

    def __init__(
        self,
        open_stream: Callable[[], Any],
        *,
        split: str,
        seed: int,
        count: int,
        repeats: bool,
        limit: int | None = None,
    ):
        self.notes: list[str] = []
        self.sample_bytes = 0.0
        self.first_read: tuple[int, str] | None = None
        self._open = open_stream
        self._split = split
        self._seed = seed
        self._count = count
        self._repeats = repeats
        self._limit = limit
        self._marks: dict[int, Mark] = {}

    def mark(self, position: int) -> Mark | None:
        known = [place for place in list(self._marks) if place <= position]
        return self._marks[max(known)] if known else None

    def read(self, mark: Mark | None, position: int) -> Generator[tuple[int, Chunk], None, None]:
        if not self._repeats:
            yield from self._read_once(position)
            return
        reader = StreamReader(
            self._open(),
            split=self._split,
            recent=MARKS,
            seed=self._seed,
            batch_size=self._count,
            limit=self._limit,
            warn=self.notes.append,
        )
        if mark is not None:
            reader.add_bookmark(mark)
        if count := reader.go_to_mark(position):
            read_past(reader, count, batch_size=self._count, tell=self.notes.append, before_each=lambda: None)
        while True:
            start = reader.position
            items = reader.read(self._count, first=0, end=self._count)
            self.first_read = reader.first_read()
            if (found := reader.bookmark(reader.position)) is not None:
                self._marks[found.position] = found
                for place in sorted(self._marks)[:-MARKS]:
                    del self._marks[place]
            yield start, Items(items)

    def _read_once(self, position: int) -> Generator[tuple[int, Chunk], None, None]:
        start, samples = 0, None
        while True:
            try:
                with drawing(mix(self._seed, self._split, "stream", start)):
                    samples = iter(self._open()) if samples is None else samples
                    items = list(itertools.islice(samples, self._count))
            except Exception as e:
                raise DataError(f"{self._split} data, in the stream: {error_text(e)}") from e
            if not items:
                return
            if start + len(items) > position:
                yield start, Items(items)
            start += len(items)
