"""A training set that is read in order: its samples, epoch after epoch, from any position.

A position is a number of samples since the beginning of the run, over all epochs. The order must be the same in every
process; then a position means the same at any number of workers, as it does for map-style datasets.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from orchestrator.compat.generators import drawing, seed_on_cpu
from orchestrator.compat.streams import loses_samples
from orchestrator.compat.torch import as_bytes
from orchestrator.job import Split
from orchestrator.protocol.metrics import Metric
from orchestrator.strategies.data.datasets import mix
from orchestrator.user_code.errors import error_text
from orchestrator.user_code.results import needed_argument
from orchestrator.worker.data.data_loader import DataError

MAX_STATE_BYTES = 2**20
"""A checkpoint keeps no larger state of a stream: its manifest is read as a whole, and often."""
_PLAIN = (str, bytes, int, float, np.generic)
LONG_S = 5.0
"""The user is told how long samples are read past if it takes longer."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A place where reading can begin.

    Attributes:
        position: the samples before it.
        epoch: the iterators of the stream that have ended before it.
        state: the stream's ``state_dict()`` there; None at the beginning of an epoch.
        seen: the position and the digest of a sample that was read at it or after it; None if none is known.
    """

    position: int = 0
    epoch: int = 0
    state: Any = None
    seen: Sequence[Any] | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Mark:
        """Return the mark that :meth:`to_json` has stored."""
        return cls(**values)

    def to_json(self) -> dict[str, Any] | None:
        """Return the mark as JSON values for a checkpoint; None if JSON would change the state, or for a large one."""
        values = {name: value for name, value in asdict(self).items() if name != "seen" or value is not None}
        try:
            text = json.dumps(values)
            unchanged = bool(json.loads(text) == values)
        except (TypeError, ValueError):
            return None
        return values if unchanged and len(text) <= MAX_STATE_BYTES else None


def digest(samples: Iterable[Any]) -> str:
    """Return a digest of the numbers and texts in samples, which is the same in any process."""
    found = hashlib.blake2b(digest_size=16)
    for sample in samples:
        _add(found, sample)
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        with contextlib.suppress(RuntimeError):  # of a tensor that is not dense
            found.update(as_bytes(value.detach().cpu()).numpy().data)
    elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
        found.update(value.tobytes())
    elif isinstance(value, _PLAIN):
        found.update(repr(value).encode())
    elif isinstance(value, (list, tuple)) and all(isinstance(part, _PLAIN) for part in value):
        found.update(repr(list(value)).encode())  # such as the tokens of a text
    elif isinstance(value, (list, tuple, np.ndarray)):
        for part in value.ravel() if isinstance(value, np.ndarray) else value:
            _add(found, part)
    elif isinstance(value, Mapping):
        _add(found, list(value.values()))
    elif dataclasses.is_dataclass(value):
        _add(found, list(vars(value).values()) if hasattr(value, "__dict__") else [])


def read_past(
    reader: StreamReader, count: int, *, batch_size: int, tell: Callable[[str], None], before_each: Callable[[], None]
) -> None:
    """Skip ``count`` samples of a stream, and tell the user of that, and how long it took if it took long.

    ``before_each``: is called before each batch. What follows is read in the calls in which it was read before.
    """
    text = f"{reader.split} data: reading past {count:,} samples of the stream to the next one"
    tell("; ".join(filter(None, (text, reader.resume_advice))))
    began, end = time.monotonic(), reader.position + count
    while reader.position < end:
        before_each()
        reader.skip(min(batch_size - reader.position % batch_size, end - reader.position))
    if (took := time.monotonic() - began) > LONG_S:
        tell(f"{reader.split} data: {count:,} samples of the stream were read past in {took:.0f} s")


class FirstSamples:
    """The first ``count`` samples of a stream, which are those of its first epoch in every epoch."""

    def __init__(self, stream: Any, count: int):
        self.stream, self.count = stream, count

    def set_epoch(self, epoch: int) -> None:
        """Begin any epoch as the first one."""
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(0)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.stream), self.count)


class StreamReader:
    """Reads the samples of a stream. The end of an iterator is the end of an epoch, and the next one begins again.

    If the stream has ``state_dict`` and ``load_state_dict``, reading can begin at any recent position. If it has
    ``set_epoch``, which is called before each iterator, reading can begin at a recent epoch. Otherwise it begins at
    the first sample, in a new object.

    Args:
        stream: an iterable whose ``__iter__`` begins again at each call.
        split: the part of the data, for error messages.
        recent: how many of the last calls of :meth:`read` can be gone back.
        seed: the seed of what the stream draws at random.
        batch_size: the samples that are read at once; after each, the seed and the position determine what is drawn.
        limit: how many samples there are at most: the first ones of the first epoch, in every epoch.
        warn: tells the user, once, that a sample is not what it was before.

    Attributes:
        position: the number of samples read or skipped.
        split: see the arguments.
        resume_advice: what a user can change so that it does; empty if it does.
    """

    def __init__(
        self,
        stream: Any,
        *,
        split: Split = "train",
        recent: int = 4,
        seed: int = 0,
        batch_size: int = 1,
        limit: int | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ):
        self.position = 0
        self._first_read: tuple[int, str] | None = None
        self._warn = warn
        self._seen: deque[tuple[int, str]] = deque(maxlen=recent)  # the first sample of each batch
        self._expected: Sequence[Any] | None = None
        self._limit = limit
        stream = stream if limit is None else FirstSamples(stream, limit)
        self._has_state, self.resume_advice = _resuming(stream)
        self._stream = stream
        self.split = split
        self._seed = seed
        self._batch_size = batch_size
        self._has_epochs = hasattr(stream, "set_epoch")
        self._epoch = 0
        self._failed = False
        self._iterator: Iterator[Any] | None = None
        self._bookmark: Mark | None = None
        self._recent: deque[Mark] = deque(maxlen=recent)
        self._epoch_starts: deque[Mark] = deque(maxlen=recent)

    def read(self, count: int, *, first: int, end: int) -> list[Any]:
        """Read ``count`` samples and return those from number ``first`` up to, but not including, ``end``.

        Raises:
            DataError: the stream raises an error, or it has no samples.
        """
        items, start, whole = [], self.position, []
        with drawing(self._seed_here):
            for i in range(count):
                item = self._next()
                if first <= i < end:
                    items.append(item)
                if i == 0:
                    self._seen.append((start, digest([item])))
                if self._first_read is None:
                    whole.append(item)
        self._first_read = self._first_read or (start, digest(whole))
        if self._has_state and (state := self._state()) is not None:
            self._recent.append(Mark(position=self.position, epoch=self._epoch, state=state))
        return items

    def reaches(self, position: int) -> bool:
        """Return whether :meth:`go_to_mark` can reach ``position``; otherwise only a new object of the stream can."""
        return self._is_before(position) or self._mark_before(position) is not None

    def add_bookmark(self, mark: Mark) -> None:
        """Add a place where reading can begin, from a checkpoint, before the first sample is read."""
        self._expected = mark.seen
        if self._has_epochs if mark.state is None else self._has_state:
            self._bookmark = mark

    def go_to_mark(self, position: int) -> int:
        """Go to the last place before ``position`` where reading can begin. Return the number of samples in between."""
        mark = self._mark_before(position)
        if mark is not None and not (self._is_before(position) and self.position >= mark.position):
            self._epoch, self.position, self._failed = mark.epoch, mark.position, False
            self._recent.clear()
            self._iterator = None  # of a beginning epoch, the next sample begins one
            if mark.state is not None:
                self._begin_epoch(mark.state)
        assert self._is_before(position), "reaches() is False"
        return position - self.position

    def skip(self, count: int) -> None:
        """Read ``count`` samples and drop them. From within a batch, skip to its end first."""
        with drawing(self._seed_here):
            for _ in range(count):
                self._next()

    def bookmark(self, position: int) -> Mark | None:
        """Keep the last mark up to ``position``, which has been trained on, and return it; None if there is none.

        A stream that has none has its beginning, if a sample is known that can be compared when it is read again.
        """
        mark = self._mark_before(position)
        if mark is not None:
            self._bookmark = mark
        begin = 0 if mark is None else mark.position
        known = [*self._seen, *([] if self._expected is None else [tuple(self._expected)])]
        seen = max((entry for entry in known if begin <= entry[0] < position), default=None)
        return mark if seen is None else replace(mark or Mark(), seen=list(seen))

    def first_read(self) -> tuple[int, str] | None:
        """Return the position and the digest of the first samples that :meth:`read` has read; None before."""
        return self._first_read

    def metrics(self) -> Mapping[str, Metric]:
        """Return none: the rank that reads measures how long it waits."""
        return {}

    @property
    def _seed_here(self) -> int:
        position = self.position if self._limit is None else self.position % self._limit
        return mix(self._seed, "stream", position)

    def _next(self) -> Any:
        for _ in range(2):  # an iterator may be at its end; the next one has a sample
            if self._iterator is None:
                seed_on_cpu(self._seed_here)
                self._begin_epoch(None)
            elif self.position % self._batch_size == 0:
                seed_on_cpu(self._seed_here)
            assert self._iterator is not None
            try:
                item = next(self._iterator)
            except StopIteration:
                self._iterator = None
                self._epoch += 1
            except Exception as e:
                self._failed = True  # the iterator of a generator that has failed looks as if it were at its end
                what = f"{self.split} data, sample {self.position} of the stream"
                raise DataError(f"{what}: {error_text(e)}") from e
            else:
                if self._expected is not None and self._expected[0] == self.position:
                    self._compare(item)
                self.position += 1
                return item
        found = f"no more than {self.position} samples" if self.position else "no samples"
        raise DataError(f"{self.split} data: the stream gives {found}; its __iter__ has to begin again at each call")

    def _compare(self, item: Any) -> None:
        """Compare a sample with what it was before, and tell the user if it differs."""
        assert self._expected is not None
        if digest([item]) != self._expected[1]:
            self._warn(
                f"{self.split} data: sample {self.position:,} is not what it was before: the stream draws at random "
                "from a generator without a seed, or the data has changed, so losses will differ from those of a run "
                "without an interruption"
            )
        self._expected = None

    def _begin_epoch(self, state: Any) -> None:
        """Begin an iterator, at ``state`` if that is not None."""
        try:
            if self._has_epochs:
                self._stream.set_epoch(self._epoch)
            if state is not None:
                self._stream.load_state_dict(copy.deepcopy(state))
            self._iterator = iter(self._stream)
        except Exception as e:
            what = f"{self.split} data, beginning epoch {self._epoch} of the stream"
            raise DataError(f"{what}: {error_text(e)}") from e
        if state is None and self._has_epochs:
            self._epoch_starts.append(Mark(position=self.position, epoch=self._epoch))

    def _state(self) -> Any:
        try:
            return copy.deepcopy(self._stream.state_dict())
        except Exception as e:
            raise DataError(f"{self.split} data, state_dict() of the stream: {error_text(e)}") from e

    def _is_before(self, position: int) -> bool:
        return self.position <= position and not self._failed

    def _mark_before(self, position: int) -> Mark | None:
        known = [*self._recent, *self._epoch_starts, *([] if self._bookmark is None else [self._bookmark])]
        return max((m for m in known if m.position <= position), key=lambda m: m.position, default=None)


def _resuming(stream: Any) -> tuple[bool, str]:
    """Return whether reading can begin at the state of ``stream``, and otherwise what a user can change."""
    if isinstance(stream, FirstSamples):
        return False, ""
    if not all(hasattr(stream, name) for name in ("state_dict", "load_state_dict")):
        return False, "with state_dict() and load_state_dict(), it could begin there"
    if name := needed_argument(stream.state_dict):
        return False, f"its state_dict() needs {name}; wrap it in a stream that counts its samples, as in docs/data.md"
    if loses_samples(stream):
        return False, "its state_dict() leaves out the samples in a shuffle buffer; shuffle(buffer_size=1) has none"
    return True, ""
