"""The rows of a ``ray.data.Dataset``, epoch after epoch, from any position.

Its tasks run on the CPUs that the workers leave free. The rows are never in this process: a share is made of references
to blocks. What was read before a position is skipped by the counts of files and blocks as far as these are known, and
compared with the digest of rows that a checkpoint keeps.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray.exceptions

from orchestrator.compat.generators import drawing
from orchestrator.compat.ray import counted_sources
from orchestrator.compat.ray import datasets as ray_data
from orchestrator.features.feeding.window import Blocks, Chunk, Window, shuffled
from orchestrator.strategies.data.columns import Columns, joined
from orchestrator.strategies.data.datasets import DatasetError, is_of_ray, mix
from orchestrator.user_code.own_errors import OwnError, may_come_again, own_error_in
from orchestrator.user_code.results import needed_argument
from orchestrator.worker.data.data_loader import DataError
from orchestrator.worker.data.stream import Mark

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s+([^\n]+)')
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Invalid)\b.*", re.MULTILINE)
"""What a traceback ends with."""
_TASK = re.compile(r"ray::(.+?)\(\) \(pid=")
Skips = bool | Literal["if known"]
"""Whether files before a row are skipped; or only if each row of them is known to make one row."""
LONG_S = 5.0
"""The user is told how long rows are read again if it takes longer, or if nothing can be skipped of such data."""
NEAR = 100
"""A digest is compared if it is of rows that are at most so many times their number before the next one."""
ROW, SEEN = "row", "seen"
"""Keys of the state of a mark: the rows of the epoch before it; and the number, the count and the digest of rows that
were read just before."""


def digest(rows: Sequence[Any]) -> str:
    """Return a digest of rows, in columns."""
    assert isinstance(rows, Columns)
    found = hashlib.blake2b(digest_size=16)
    for name, column in rows.columns.items():
        found.update(name.encode())
        found.update(column.tobytes() if column.dtype.kind != "O" else repr(column.tolist()).encode())
    return found.hexdigest()


def tells_position(rows: Sequence[Any]) -> bool:
    """Return whether the digest of rows would differ one row later. It does not if all are alike."""
    return len(rows) == 1 or digest(rows[1:]) != digest(rows[:-1])


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How rows are read.

    Attributes:
        split: the part of the data.
        seed: of the run.
        window: in how many consecutive rows the order is shuffled; 0 to keep it.
        repeats: whether an epoch follows the last one.
        cpus: the most CPUs for the tasks; None for all that are free.
        limit: the rows of an epoch at most, which are those of the first epoch; None for all.
        store_bytes: the size of the object store; infinite if that has no bound.
    """

    split: str
    seed: int
    window: int = 0
    repeats: bool = True
    cpus: float | None = None
    limit: int | None = None
    store_bytes: float = math.inf


class Rows:
    """See :class:`feed.Source`.

    Args:
        open_dataset: returns a new dataset, or a function that makes that of an epoch.
        reading: how it is read.
        check: refuses a dataset before it is read.

    Attributes:
        notes, sample_bytes, first_read: see :class:`feed.Source`.
    """

    def __init__(
        self, open_dataset: Callable[[], Any], reading: Reading, *, check: Callable[[Any], None] = lambda dataset: None
    ):
        self.notes: list[str] = []
        self.sample_bytes = 0.0
        self.first_read: tuple[int, str] | None = None
        self._open = open_dataset
        self._reading = reading
        self._check = check
        self._starts: dict[int, int] = {}  # the position of the first row of each epoch
        self._schema: Mapping[str, str] = {}

    def mark(self, position: int) -> Mark | None:
        known = [(start, epoch) for epoch, start in list(self._starts.items()) if start <= position]
        if not known:
            return None
        start, epoch = max(known)
        return Mark(position=position, epoch=epoch, state={ROW: position - start})

    def length(self, *, up_to: float, limit_s: float) -> int:
        """Return the number of rows of the first epoch. See :meth:`Feeder.length`.

        Raises:
            DatasetError: it is not known.
        """
        if known := counted_sources.known_count(self._prepared(0)):
            return int(min(known, up_to))
        found, deadline = 0, time.monotonic() + limit_s
        with contextlib.closing(self.read(None, 0)) as chunks:
            for _, chunk in chunks:
                found += len(chunk)
                if found >= up_to:
                    return int(up_to)
                if time.monotonic() > deadline:
                    text = f"{found:,} rows were counted in {limit_s:g} s, and there are more; it may have no end"
                    raise DatasetError(text)
        return found

    def read(self, mark: Mark | None, position: int) -> Generator[tuple[int, Chunk], None, None]:
        epoch, row, seen = 0, position, None
        if mark is not None:
            epoch, row = mark.epoch, mark.state[ROW] + position - mark.position
            seen = mark.state.get(SEEN)
            if seen is not None and row - seen[0] > NEAR * seen[1]:
                seen = None  # what was kept is far before
        while True:
            start = self._starts[epoch] = position - row
            rows = yield from self._epoch(epoch, row, seen)
            if rows == 0:
                where = f"job.dataset({self._reading.split!r})"
                raise DatasetError(f"{where}: the dataset has no rows; give it at least one")
            if not self._reading.repeats:
                return
            epoch, row, seen = epoch + 1, max(0, row - rows), None
            position = max(position, start + rows)

    def _epoch(self, epoch: int, row: int, seen: Any) -> Generator[tuple[int, Chunk], None, int]:
        """Yield the chunks of an epoch from number ``row`` on; return how many rows it has.

        Args:
            seen: the number, the count and the digest of rows that a checkpoint has kept; None without one.
        """
        start, wanted = self._starts[epoch], row if seen is None else min(row, seen[0])
        attempts: Sequence[Skips] = ("if known",) if seen is None else (True, False)
        for skips in attempts:
            began = time.monotonic()
            chunks = self._chunks(epoch, wanted, skips=skips)
            with contextlib.closing(chunks):
                first = next(chunks, None)
                if first is None:
                    return self._rows
                skipped = self._skipped
                read, same = [first], True
                if seen is not None:
                    end = seen[0] + seen[1]
                    read += self._until(chunks, read[-1], end)
                    same = self._has(read, seen)
                if not same and skipped:
                    continue  # a function may return other numbers of rows than it is given
                if not same:
                    self.notes.append(
                        f"{self._reading.split} data: rows {seen[0]} to {end - 1} of epoch {epoch} are not what they "
                        "were before: a function of the data draws at random, or the data has changed, so losses will "
                        "differ from those of a run without an interruption"
                    )
                read += self._until(chunks, read[-1], row + 1)
                took = time.monotonic() - began
                if row and not skipped and (took > LONG_S or not self._has_counts):
                    self.notes.append(
                        f"{self._reading.split} data: {row:,} rows of the epoch were read again in {took:.1f} s, "
                        "because only files of parquet, images and blocks in the object store can be skipped, if they "
                        "are read by map, map_batches and select_columns and what follows is the same as before"
                    )
                for number, chunk in read:
                    if number + len(chunk) > row:
                        yield start + number, chunk
                for number, chunk in chunks:
                    yield start + number, chunk
                return self._rows
        raise AssertionError("the second attempt skips nothing")

    def _until(self, chunks: Iterator[tuple[int, Chunk]], last: tuple[int, Chunk], end: int) -> list[tuple[int, Chunk]]:
        """Return the further chunks up to row ``end``, as far as there are any."""
        found = []
        while last[0] + len(last[1]) < end and (following := next(chunks, None)) is not None:
            found.append(last := following)
        return found

    def _has(self, read: Sequence[tuple[int, Chunk]], seen: Any) -> bool:
        """Return whether the rows of ``seen`` among those that were read have its digest."""
        number, count, wanted = seen
        if read[-1][0] + len(read[-1][1]) < number + count:
            return False
        window = Window(read[0][0])
        for start, chunk in read:
            window.add(start, chunk)
        rows = joined([part.load(ray_data.columns) for part in window.parts(number, number + count)])
        return digest(rows) == str(wanted)

    def _chunks(self, epoch: int, row: int, *, skips: Skips) -> Generator[tuple[int, Chunk], None, None]:
        """Yield the chunks of an epoch with the number of their first row; the first one may begin before ``row``."""
        window, limit = self._reading.window, self._reading.limit
        if limit is not None:
            epoch = 0
        last = math.inf if limit is None else -(-limit // window) * window if window else limit
        begin = row // window * window if window else row
        dataset = self._prepared(epoch)
        self._has_counts = counted_sources.has_counts(dataset)
        if skips == "if known":
            skips = counted_sources.keeps_count(dataset)
        dataset, number = counted_sources.without_first(dataset, begin if skips else 0)
        pending: list[tuple[Any, int, int]] = []
        count = num_bytes = 0  # of the pending rows
        self._rows = self._skipped = number
        try:
            for block in ray_data.blocks(dataset):
                self._check_schema(block.schema)
                self.sample_bytes = self.sample_bytes or block.row_bytes
                first, rows, num_bytes = block.first, block.rows, num_bytes + block.num_bytes
                if (rows := int(min(rows, last - self._rows))) <= 0:
                    break
                if self._reading.window and num_bytes > self._reading.store_bytes:
                    raise DatasetError(
                        f"data.shuffle_window={self._reading.window}: {count + rows:,} rows of a window take "
                        f"{num_bytes / 1e9:.3g} GB, and the object store of the cluster has "
                        f"{self._reading.store_bytes / 1e9:.3g} GB; lower it, or start Ray with a larger "
                        "--object-store-memory"
                    )
                self._rows += rows
                if (before := min(rows, begin - number)) > 0:
                    first, rows, number = first + before, rows - before, number + before
                while rows:
                    taken = min(rows, window - count) if window else rows
                    pending.append((block.ref, first, taken))
                    first, rows, count = first + taken, rows - taken, count + taken
                    if count >= window:
                        yield number, self._chunk(pending, count, epoch, number, num_bytes)
                        number, pending, count, num_bytes = number + count, [], 0, 0
        except ray.exceptions.RayError as e:
            raise task_error(self._reading.split, e) from e
        except ray_data.SchemaError as e:
            raise self._schema_error(e) from e
        if pending:
            yield number, self._chunk(pending, count, epoch, number, num_bytes)
        self._rows = int(min(self._rows, math.inf if limit is None else limit))

    def _chunk(
        self, pending: Sequence[tuple[Any, int, int]], rows: int, epoch: int, number: int, num_bytes: int
    ) -> Chunk:
        if not (window := self._reading.window):
            return Blocks(pending, num_bytes=num_bytes)
        order = shuffled(rows, seed=self._reading.seed, epoch=epoch, window=number // window)
        if (limit := self._reading.limit) is not None:
            order = order[: limit - number]
        return Blocks(pending, order, num_bytes=num_bytes)

    def _prepared(self, epoch: int) -> Any:
        """Return the dataset of an epoch, which has not been executed.

        Raises:
            DatasetError: it has no order that a run could come back to.
        """
        where = f"job.dataset({self._reading.split!r})"
        with ray_data.in_order(), drawing(mix(self._reading.seed, self._reading.split, epoch)):
            dataset = self._open()
            made_by = "" if is_of_ray(dataset) else "function that makes a "
            if made_by:
                parameters = inspect.signature(dataset).parameters
                if (name := needed_argument(functools.partial(dataset, epoch) if parameters else dataset)) is not None:
                    raise DatasetError(f"{where} returns a function that needs {name}; let it take the epoch alone")
                dataset = dataset(epoch) if parameters else dataset()
            if not ray_data.is_dataset(dataset):
                raise DatasetError(
                    f"{where} returns a {made_by}{type(dataset).__name__}; let it {'make' if made_by else 'return'} a "
                    "ray.data.Dataset"
                )
        if (operator := ray_data.unseeded_operator(dataset)) is not None:
            raise DatasetError(
                f"{where}: {operator} without a seed has another order each time that it is read, so that no run could "
                "continue; give it a seed, or leave it out and set data.shuffle_window"
            )
        self._check(dataset)
        ray_data.prepare(dataset, cpus=self._reading.cpus, execution=epoch)
        return dataset

    def _check_schema(self, schema: Mapping[str, str]) -> None:
        known = self._schema or schema
        if schema and (known.keys() != schema.keys() or any(len({"null", known[n], schema[n]}) > 2 for n in known)):
            raise self._schema_error(
                "; and ".join(", ".join(f"{n}: {t}" for n, t in s.items()) for s in (known, schema))
            )
        self._schema = {name: schema.get(name, kind) if kind == "null" else kind for name, kind in known.items()}

    def _schema_error(self, schemas: object) -> DatasetError:
        return DatasetError(
            f"job.dataset({self._reading.split!r}): rows of several schemas ({schemas}); give all rows the same "
            "columns and types"
        )


def task_error(split: str, error: BaseException) -> DataError:
    """Return the error of a task, or of an actor. One of the user would come again: each attempt gets the same rows."""
    raised, _, _ = _COLOUR.sub("", str(error)).strip().partition("\n\nThe above exception was the direct cause")
    of_user = isinstance(error, ray.exceptions.UserCodeException)
    lines = raised.splitlines()[-1:] if of_user else _RAISED.findall(raised) or raised.splitlines()[:1]
    found = DataError(f"{split} data, in a task of Ray Data: {lines[-1] if lines else type(error).__name__}")
    if of_user and (frames := _FRAME.findall(raised)):
        file, line, code = frames[-1]
        found.own_error = OwnError(place=f"{Path(file).name}:{line}: {code.strip()}", frames="", comes_again=True)
    elif isinstance(error, ray.exceptions.RayActorError):  # the class of a user, in its __init__
        found.own_error = own_error_in(raised)
    elif isinstance(error, ray.exceptions.RayTaskError) and may_come_again(error.cause):  # what a function has returned
        place = _TASK.search(raised)
        found.own_error = OwnError(place=place[1] if place else "a task of the data", frames="", comes_again=True)
    return found
