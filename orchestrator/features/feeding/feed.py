"""One split of the data as a feeder reads it: ahead of the ranks, in a thread, and from any position."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Protocol

from orchestrator.features.feeding.window import Chunk, Part, Window
from orchestrator.strategies.data.datasets import DatasetError
from orchestrator.user_code.errors import JobError, error_text
from orchestrator.user_code.own_errors import own_error
from orchestrator.worker.data.data_loader import DataError, ReadFailure
from orchestrator.worker.data.stream import Mark

FULL = 0.5
"""The share of the object store from which on the user is told."""
ANSWER_S = 5.0
"""After this time a request is answered without samples, and the rank asks again."""
AT_ONCE = 64
"""An answer has the shares of at most so many global batches."""


class Source(Protocol):
    """What reads the samples of a split.

    Attributes:
        notes: what the user should know about how they are read.
        sample_bytes: the size of a sample in the object store; 0 if it is not there, or not known yet.
        first_read: the position and the digest of the first samples of a stream; None before these are read.
    """

    notes: list[str]
    sample_bytes: float
    first_read: tuple[int, str] | None

    def read(self, mark: Mark | None, position: int) -> Generator[tuple[int, Chunk], None, None]:
        """Yield chunks with the positions where they begin; the first one has the sample at ``position``.

        Args:
            mark: a place at or before ``position`` where reading can begin; None for the beginning of the run.
        """

    def mark(self, position: int) -> Mark | None:
        """Return the last known place up to ``position`` where reading can begin; None if none is known."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A rank asks for its share of a global batch.

    Attributes:
        asker: the rank.
        generation: of the run; the requests of earlier ones are not answered.
        position: that of the first sample of the global batch.
        count: the samples of the global batch.
        first, end: the share, in samples of the global batch.
        keep: the position from which the rank may ask again.
        ahead: how many samples may be read ahead.
        once: whether the split ends, as in an evaluation; otherwise an epoch follows the last one.
        mark: where reading can begin, if the rank knows it from a checkpoint.
        lost: the reading whose blocks the rank could not get; None if it could.
    """

    asker: int
    generation: int
    position: int
    count: int
    first: int
    end: int
    keep: int
    ahead: int
    once: bool = False
    mark: Mark | None = None
    lost: int | None = None


@dataclass(frozen=True, kw_only=True)
class Share:
    """The answer.

    Attributes:
        parts: the samples of the share; None if they are not there yet.
        count: the samples of the global batch, of which there are fewer at the end of a split that is read once.
        reading: counts how often reading has begun.
        mark: where reading can begin, at the end of the batch or before.
        notes: what the user should know.
        rows_per_s: the samples that have been read in a second of reading.
        kept_mb: the size of the blocks in the object store that are kept for the ranks; infinite for a stream.
        further: the shares of the global batches after this one.
    """

    parts: tuple[Part, ...] | None
    count: int
    reading: int
    mark: Mark | None
    notes: tuple[str, ...]
    rows_per_s: float = 0.0
    kept_mb: float = math.inf
    further: tuple[Share, ...] = ()


class Feed:
    """Answers requests of several threads.

    Args:
        make_source: opens the data.
        keep_bytes: the size of a split up to which all of it is kept, because it is read again and again.
        store_bytes: the size of the object store; infinite if that has no bound.
    """

    def __init__(self, make_source: Callable[[], Source], *, keep_bytes: float = 0.0, store_bytes: float = math.inf):
        self._make_source = make_source
        self._keep_bytes = keep_bytes
        self._store_bytes = store_bytes
        self._changed = threading.Condition()
        self._generation = -1
        self._keeps: dict[int, int] = {}
        self._source: Source | None = None
        self._window = Window(0)
        self._reading = 0
        self._wanted = 0  # the position up to which samples are read
        self._ended: int | None = None
        self._failure: ReadFailure | None = None
        self._rows, self._reading_s = 0, 0.0
        self._is_full = False

    def take(self, request: Request) -> Share | ReadFailure | None:
        """Return the share, or an error; None for a request of an earlier generation."""
        deadline = time.monotonic() + ANSWER_S
        with self._changed:
            if request.generation > self._generation:
                self._generation, self._keeps = request.generation, {}
                if self._failure is not None:
                    self._begin(request)
            while True:
                if request.generation < self._generation:
                    return None
                if self._reading == 0 or request.position < self._window.start or request.lost == self._reading:
                    self._begin(request)
                self._keeps[request.asker] = request.keep
                self._wanted = max(self._wanted, request.position + request.count + request.ahead)
                if self._window.num_bytes > self._keep_bytes:
                    self._window.drop_before(min(self._keeps.values()))
                self._changed.notify_all()
                stop = request.position + request.count
                if self._window.end >= stop or self._ended is not None:
                    return self._shares(request, min(stop, self._window.end))
                if self._failure is not None:
                    return self._failure
                if not self._changed.wait(deadline - time.monotonic()):
                    return Share(parts=None, count=0, reading=self._reading, mark=None, notes=self._notes())

    @property
    def first_read(self) -> tuple[int, str] | None:
        """See :class:`Source`."""
        return None if self._source is None else self._source.first_read

    def close(self) -> None:
        """End reading. A later request begins it again."""
        with self._changed:
            self._reading += 1
            self._window, self._ended, self._failure = Window(0), None, None
            self._window.start = 2**63
            self._changed.notify_all()

    def _shares(self, request: Request, stop: int) -> Share:
        """Return the share, with those of the batches after it that are there already.

        These are half of what may be read ahead, and all of a chunk, which is kept as a whole in any case.
        """
        half = request.ahead // 2
        end = min(self._window.end, max(stop + half, self._window.chunk_end(request.position)))
        starts = range(stop, end - request.count + 1, request.count)[: AT_ONCE - 1]
        further = tuple(self._share(replace(request, position=start), start + request.count) for start in starts)
        self._wanted = max(self._wanted, stop + len(further) * request.count + half)
        self._changed.notify_all()
        return replace(self._share(request, stop), further=further)

    def _share(self, request: Request, stop: int) -> Share:
        count = max(0, stop - request.position)
        first, end = min(request.first, count - 1), min(request.end, count)  # the last sample, in place of none
        parts = self._window.parts(request.position + first, request.position + max(end, first + 1)) if count else []
        assert self._source is not None
        mark = self._source.mark(request.position + count)
        return Share(
            parts=tuple(parts),
            count=count,
            reading=self._reading,
            mark=mark,
            notes=self._notes(),
            rows_per_s=self._rows / max(self._reading_s, 1e-9),
            kept_mb=self._window.kept_bytes / 1e6,
        )

    def _notes(self) -> tuple[str, ...]:
        return () if self._source is None else tuple(self._source.notes)

    def _begin(self, request: Request) -> None:
        """Begin to read at the position of ``request``, in a new thread."""
        position = request.position
        known = [request.mark, None if self._source is None else self._source.mark(position)]
        marks = [mark for mark in known if mark is not None and mark.position <= position]
        notes = [] if self._source is None else self._source.notes
        self._reading += 1
        self._window, self._wanted = Window(position), position
        self._ended = self._failure = None
        self._keeps = {}
        self._source = None
        try:
            self._source = self._make_source()
        except Exception as e:
            self._failure = failure_of(e)
            return
        self._source.notes += notes
        mark = max(marks, key=lambda mark: mark.position, default=None)
        args = (self._source, self._reading, mark, request)
        threading.Thread(target=self._read, args=args, daemon=True, name="feed").start()
        self._changed.notify_all()

    def _read(self, source: Source, reading: int, mark: Mark | None, request: Request) -> None:
        """Fill the window as long as this is the present ``reading``."""
        began = time.monotonic()
        try:
            with contextlib.closing(source.read(mark, request.position)) as chunks:
                for start, chunk in chunks:
                    check_room(source.sample_bytes, request, self._store_bytes)
                    with self._changed:
                        if reading == self._reading:
                            self._rows, self._reading_s = self._rows + len(chunk), self._reading_s + _since(began)
                            self._window.add(start, chunk)
                            self._check_store(source)
                            self._changed.notify_all()
                        while reading == self._reading and self._window.end >= self._wanted:
                            self._changed.wait()
                        if reading != self._reading:
                            return
                    began = time.monotonic()
            with self._changed:
                if reading == self._reading:
                    self._ended = self._window.end
                    self._changed.notify_all()
        except BaseException as e:
            with self._changed:
                if reading == self._reading:
                    self._failure = failure_of(e)
                    self._changed.notify_all()

    def _check_store(self, source: Source) -> None:
        """Tell the user, once, if the blocks that are kept fill the object store."""
        kept = self._window.kept_bytes
        if FULL * self._store_bytes < kept < math.inf and not self._is_full:
            self._is_full = True
            source.notes.append(
                f"the rows that are read ahead take {kept / 1e9:.3g} of {self._store_bytes / 1e9:.3g} GB in the object "
                "store of the cluster, from where Ray writes them to disk; lower data.batches_ahead or "
                "data.shuffle_window, or the target_max_block_size of Ray Data"
            )


def check_room(sample_bytes: float, request: Request, store_bytes: float) -> None:
    """Refuse a run whose batches ahead do not fit into the object store.

    Raises:
        DatasetError: Ray would write each batch to disk before a rank reads it.
    """
    samples = request.count + request.ahead
    if (needed := samples * sample_bytes) > store_bytes:
        raise DatasetError(
            f"data.batches_ahead: a global batch and the {request.ahead // request.count} ahead of it are {samples:,} "
            f"samples of {needed / 1e9:.3g} GB, and the object store of the cluster has {store_bytes / 1e9:.3g} GB; "
            "lower data.batches_ahead or train.global_batch_size, or start Ray with a larger --object-store-memory"
        )


def _since(began: float) -> float:
    return time.monotonic() - began


def failure_of(error: BaseException) -> ReadFailure:
    """Return an error of the data, which is handled, as a text for the ranks."""
    if isinstance(error, (DataError, JobError)):
        return ReadFailure.of(error)
    text = str(error) if isinstance(error, DatasetError) else error_text(error)
    return ReadFailure(text, traceback.format_exc(), isinstance(error, DatasetError), own_error(error))
