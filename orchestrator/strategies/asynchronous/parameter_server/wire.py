"""What travels between the workers of a parameter server and its shards: point to point, in host memory.

A push is one message: a count for each piece of the shard, then the gradients of the pieces that travel whole. Of a
table with sparse gradients only rows travel, with their numbers, in a second message; the counts say how many. An
answer has the shard's whole pieces as they lie in its memory, then the rows that this worker has not seen yet.

Where nobody waits for anybody, a shard has a thread for each worker to receive its pushes (:class:`Arrivals`): gloo can
wait for whichever comes first, but that wait does not end where a connection closes.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.model.sharding import ALIGNMENT_BYTES, Extent, cut, offsets, wire_dtype
from orchestrator.planning.mesh import Mesh

PUSH, PUSHED_ROWS, READY, NORM, ANSWER, ANSWERED_COUNTS, ANSWERED_ROWS = range(1, 8)
"""Tags of messages."""

ABSENT = -1
"""As a count: there is no gradient."""

FAR_APART = timedelta(days=30)

Rows = tuple[Tensor, Tensor]
"""Numbers of rows, of shape (n,) and in the :func:`number_dtype` of their table, and the rows, of shape (n, ...)."""


@dataclass(frozen=True)
class Groups:
    """``long_timeout``: all ranks, however far apart in time they are. ``pushes``: for pushes that are received in the
    background, on connections of their own, so that a shard that leaves closes all others at once. ``copies``: the
    shards, for their copies."""

    workers: dist.ProcessGroup
    shards: dist.ProcessGroup
    long_timeout: dist.ProcessGroup
    pushes: dist.ProcessGroup
    copies: dist.ProcessGroup

    @staticmethod
    def form(mesh: Mesh) -> Groups:
        """Every rank forms all of them, in one order."""
        return Groups(
            workers=dist.new_group(list(range(mesh.num_workers))),
            shards=dist.new_group(list(mesh.shards)),
            long_timeout=dist.new_group(timeout=FAR_APART),
            pushes=dist.new_group(timeout=FAR_APART),
            copies=dist.new_group(list(mesh.shards)),
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a parameter on its shard.

    ``begin`` and ``end``: the bytes it has in the memory of all parameters that are cut anywhere. ``row``: the shape
    of a row, where rows travel; then the piece has no bytes there.
    """

    name: str
    start: int
    stop: int
    dtype: torch.dtype
    begin: int = 0
    end: int = 0
    row: torch.Size | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor that has the parameter's shape: its rows, or its numbers in one dimension."""
        return (tensor.reshape(-1) if self.row is None else tensor)[self.start : self.stop]


def parts_of(
    extents: Sequence[Extent], parameters: Mapping[str, Tensor], num_shards: int
) -> tuple[tuple[Part, ...], ...]:
    """What each shard holds.

    Raises:
        ValueError: there are more shards than numbers in the parameters.
    """
    at, of = offsets(extents), {e.name: e for e in extents}

    def part(name: str, start: int, stop: int) -> Part:
        parameter, extent = parameters[name], of[name]
        if extent.by_rows:
            return Part(name=name, start=start, stop=stop, dtype=parameter.dtype, row=parameter.shape[1:])
        begin, end = (at[name] + unit * extent.unit_bytes for unit in (start, stop))
        return Part(name=name, start=start, stop=stop, dtype=parameter.dtype, begin=begin, end=end)

    return tuple(tuple(part(p.name, p.start, p.stop) for p in pieces) for pieces in cut(extents, num_shards))


def whole_bytes(parts: Sequence[Part]) -> slice:
    """The bytes of a shard in the memory of all parameters that are cut anywhere: they follow each other."""
    whole = [part for part in parts if part.row is None]
    return slice(whole[0].begin, whole[-1].end) if whole else slice(0, 0)


class Push:
    """The memory of a push, laid out alike at both ends."""

    def __init__(self, parts: Sequence[Part], *, compression: str):
        self._parts = {part.name: part for part in parts}
        self._dtypes = {part.name: wire_dtype(part.dtype, compression) for part in parts}
        self._counts = dict.fromkeys(self._parts, ABSENT)
        self._rows: dict[str, Rows] = {}
        whole = [part for part in parts if part.row is None]
        sizes = [8 * len(parts), *((p.stop - p.start) * self._dtypes[p.name].itemsize for p in whole)]
        starts = _aligned(sizes)
        self._memory = torch.zeros(starts[-1], dtype=torch.uint8)
        self._header = self._memory[: sizes[0]].view(torch.int64)
        self._whole = {
            part.name: self._memory[start : start + size].view(self._dtypes[part.name])
            for part, start, size in zip(whole, starts[1:-1], sizes[1:], strict=True)
        }

    def clear(self) -> None:
        """Before the gradients of another step are put in."""
        self._counts = dict.fromkeys(self._parts, ABSENT)
        self._rows = {}

    def put(self, name: str, gradient: Tensor) -> None:
        """Put in this shard's part of a parameter's gradient; a later one replaces it."""
        part = self._parts[name]
        if part.row is None:
            whole = gradient.to_dense() if gradient.is_sparse else gradient
            self._whole[name].copy_(part.of(whole))
            self._counts[name] = 0
            return
        sparse = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
        numbers = sparse.indices()[0]
        first, last = torch.searchsorted(numbers, torch.tensor([part.start, part.stop], device=numbers.device)).tolist()
        here = (numbers[first:last] - part.start).to("cpu", number_dtype(part.stop - part.start))
        self._rows[name] = here, sparse.values()[first:last].to("cpu", self._dtypes[name])
        self._counts[name] = len(here)

    def send(self, to: int, sends: PendingSends, group: dist.ProcessGroup | None = None) -> None:
        self._header.copy_(torch.tensor(list(self._counts.values())))
        sends.send(self._memory, to, PUSH, group)
        rows = [self._rows[name] for name in self._parts if name in self._rows]  # gradients come in any order
        if any(len(numbers) for numbers, _ in rows):
            sends.send(pack_rows(rows), to, PUSHED_ROWS, group)

    def expect(self, source: int, group: dist.ProcessGroup | None = None) -> dist.Work:
        """Begin to receive the push of a worker."""
        work = dist.irecv(self._memory, source, group=group, tag=PUSH)
        assert work is not None
        return work

    def complete(self, source: int, group: dist.ProcessGroup | None = None) -> None:
        """After what was expected has come: the rest of it."""
        self._counts = dict(zip(self._parts, self._header.tolist(), strict=True))
        self._rows = {}
        specs = {
            name: RowsSpec(max(0, self._counts[name]), part.stop - part.start, self._dtypes[name], part.row)
            for name, part in self._parts.items()
            if part.row is not None
        }
        rows = receive_rows(list(specs.values()), source, PUSHED_ROWS, group)
        self._rows = {name: pair for name, pair in zip(specs, rows, strict=True) if self._counts[name] != ABSENT}

    def whole(self, name: str) -> Tensor | None:
        """The gradient of a whole piece, of shape (n,), in the type that it travelled in; None: there is none."""
        return None if self._counts[name] == ABSENT else self._whole[name]

    def rows(self, name: str) -> Rows | None:
        """The rows of a table that have a gradient; None: there is none at all."""
        return self._rows.get(name)


class PushReceiver:
    """The pushes of several workers in the order in which they come, each received in memory of its own."""

    def __init__(self, pushes: Mapping[int, Push], group: dist.ProcessGroup):
        self._pushes = pushes
        self._arrived: queue.SimpleQueue[tuple[int, Exception | None]] = queue.SimpleQueue()
        self._free = {worker: threading.Semaphore() for worker in pushes}
        self._ended = False
        for worker in pushes:
            threading.Thread(target=self._receive, args=(worker, group), name=f"push-{worker}", daemon=True).start()

    def next(self) -> tuple[int, Push]:
        """The push that comes first, and whose it is; its memory is in use until :meth:`free`.

        Raises:
            RuntimeError: the connection to a worker is closed.
        """
        worker, error = self._arrived.get()
        if error is not None:
            raise error
        return worker, self._pushes[worker]

    def free(self, worker: int) -> None:
        """The next push of the worker may come."""
        self._free[worker].release()

    def end(self) -> None:
        """No further push is received; one that is expected already, until its worker leaves the group."""
        self._ended = True
        for worker in self._free:
            self.free(worker)

    def _receive(self, worker: int, group: dist.ProcessGroup) -> None:
        error: Exception | None = None
        while error is None:
            self._free[worker].acquire()
            if self._ended:
                return
            try:
                self._pushes[worker].expect(worker, group).wait()
                self._pushes[worker].complete(worker, group)
            except Exception as e:
                error = e.with_traceback(None)  # which would keep the group
            self._arrived.put((worker, error))


class PendingSends:
    """Messages on their way, whose memory must not change meanwhile. ``size_bytes``: of all that were ever sent."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, dist.Work]] = []
        self.size_bytes = 0

    def send(self, memory: Tensor, to: int, tag: int, group: dist.ProcessGroup | None = None) -> None:
        work = dist.isend(memory, to, group=group, tag=tag)
        assert work is not None
        self._pending.append((memory, work))
        self.size_bytes += memory.nbytes

    def wait(self) -> None:
        """Until all have arrived."""
        for _, work in self._pending:
            work.wait()
        self._pending = []


class RowsSpec(NamedTuple):
    """``rows`` of a table that has ``table_rows``, of this type and shape."""

    rows: int
    table_rows: int
    dtype: torch.dtype
    row: torch.Size


def number_dtype(table_rows: int) -> torch.dtype:
    """The type in which rows of a table are numbered: with rows of few numbers it is most of what travels."""
    return torch.uint16 if table_rows <= 2**16 else torch.int32


def pack_rows(rows: Sequence[Rows]) -> Tensor:
    """Numbers and rows of several tables as one message, bytes of shape (n,)."""
    tensors = list(itertools.chain.from_iterable(rows))
    starts = _aligned([t.nbytes for t in tensors])
    memory = torch.empty(starts[-1], dtype=torch.uint8)
    for tensor, start in zip(tensors, starts, strict=False):
        memory[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    return memory


def receive_rows(
    specs: Sequence[RowsSpec], source: int, tag: int, group: dist.ProcessGroup | None = None
) -> list[Rows]:
    """What :func:`pack_rows` has packed; a message without any row is never sent."""
    numbers = [number_dtype(spec.table_rows) for spec in specs]
    sizes = list(
        itertools.chain.from_iterable(
            (s.rows * n.itemsize, s.rows * s.dtype.itemsize * s.row.numel())
            for s, n in zip(specs, numbers, strict=True)
        )
    )
    starts = _aligned(sizes)
    memory = torch.empty(starts[-1], dtype=torch.uint8)
    if any(spec.rows for spec in specs):
        dist.recv(memory, source, group=group, tag=tag)
    slices: Iterator[Tensor] = (memory[a : a + n] for a, n in zip(starts, sizes, strict=False))
    return [
        (next(slices).view(n), next(slices).view(s.dtype).view(s.rows, *s.row))
        for s, n in zip(specs, numbers, strict=True)
    ]


def _aligned(sizes: Sequence[int]) -> list[int]:
    """Where things of these sizes begin one after another; last, where all end."""
    padded = (-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)
    return list(itertools.accumulate(padded, initial=0))
