"""The messages between workers and servers, sent point to point from host memory.

A push is one message: a count for each shard of the server, then the gradients of its dense shards. Gradients of tables
are sparse: their rows follow in a second message, with the row numbers, and the counts say how many there are. An
answer holds the server's dense shards as they lie in its memory, then the rows of tables that the worker has not seen.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.features.asynchronous.parameter_server.placed_shards import PlacedShard
from orchestrator.model.parameter_division import ALIGNMENT_BYTES

PUSH, PUSHED_ROWS, READY, NORM, ANSWER, ANSWERED_COUNTS, ANSWERED_ROWS = range(1, 8)
"""Message tags."""

ABSENT = -1
"""The count of a shard that has no gradient."""

Rows = tuple[Tensor, Tensor]
"""Row numbers, of shape (n,) in the :func:`number_dtype` of their table, and the rows, of shape (n, ...)."""


class Push:
    """The buffer of a push, with the same layout on the worker and on the server."""

    def __init__(self, shards: Sequence[PlacedShard]):
        self._shards = {shard.name: shard for shard in shards}
        self._counts = dict.fromkeys(self._shards, ABSENT)
        self._rows: dict[str, Rows] = {}
        dense = [shard for shard in shards if shard.row is None]
        sizes = [8 * len(shards), *((p.stop - p.start) * p.dtype.itemsize for p in dense)]
        starts = _aligned(sizes)
        self._memory = torch.zeros(starts[-1], dtype=torch.uint8)
        self._header = self._memory[: sizes[0]].view(torch.int64)
        self._dense = {
            shard.name: self._memory[start : start + size].view(shard.dtype)
            for shard, start, size in zip(dense, starts[1:-1], sizes[1:], strict=True)
        }

    def clear(self) -> None:
        """Remove the gradients of the last step."""
        self._counts = dict.fromkeys(self._shards, ABSENT)
        self._rows = {}

    def put(self, name: str, gradient: Tensor) -> None:
        """Copy the server's shard of a gradient into the buffer, replacing an earlier one."""
        shard = self._shards[name]
        if shard.row is None:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            self._dense[name].copy_(shard.of(dense))
            self._counts[name] = 0
            return
        sparse = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
        numbers = sparse.indices()[0]
        first, last = torch.searchsorted(
            numbers, torch.tensor([shard.start, shard.stop], device=numbers.device)
        ).tolist()
        local = (numbers[first:last] - shard.start).to("cpu", number_dtype(shard.stop - shard.start))
        self._rows[name] = local, sparse.values()[first:last].to("cpu", shard.dtype)
        self._counts[name] = len(local)

    def send(self, to: int, sends: PendingSends, group: dist.ProcessGroup | None = None) -> None:
        """Start to send the push to the server ``to``. The buffer must not change until ``sends`` has completed."""
        self._header.copy_(torch.tensor(list(self._counts.values())))
        sends.send(self._memory, to, PUSH, group)
        rows = [self._rows[name] for name in self._shards if name in self._rows]  # gradients come in any order
        if any(len(numbers) for numbers, _ in rows):
            sends.send(pack_rows(rows), to, PUSHED_ROWS, group)

    def expect(self, source: int, group: dist.ProcessGroup | None = None) -> dist.Work:
        """Start to receive the first message of the worker ``source``."""
        work = dist.irecv(self._memory, source, group=group, tag=PUSH)
        assert work is not None
        return work

    def complete(self, source: int, group: dist.ProcessGroup | None = None) -> None:
        """Receive the rows, after the first message has arrived."""
        self._counts = dict(zip(self._shards, self._header.tolist(), strict=True))
        self._rows = {}
        specs = {
            name: RowsSpec(max(0, self._counts[name]), shard.stop - shard.start, shard.dtype, shard.row)
            for name, shard in self._shards.items()
            if shard.row is not None
        }
        rows = receive_rows(list(specs.values()), source, PUSHED_ROWS, group)
        self._rows = {name: pair for name, pair in zip(specs, rows, strict=True) if self._counts[name] != ABSENT}

    def dense(self, name: str) -> Tensor | None:
        """Return the gradient of a dense shard, of shape (n,); None if absent."""
        return None if self._counts[name] == ABSENT else self._dense[name]

    def rows(self, name: str) -> Rows | None:
        """Return the rows of a table's gradient; None if it is absent."""
        return self._rows.get(name)


class PendingSends:
    """Messages being sent, whose memory must not change before they have arrived.

    Attributes:
        size_bytes: the bytes sent since the caller last set it to 0.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, dist.Work]] = []
        self.size_bytes = 0

    def send(self, memory: Tensor, to: int, tag: int, group: dist.ProcessGroup | None = None) -> None:
        """Start to send ``memory`` to the rank ``to``."""
        work = dist.isend(memory, to, group=group, tag=tag)
        assert work is not None
        self._pending.append((memory, work))
        self.size_bytes += memory.nbytes

    def wait(self) -> None:
        """Wait until all messages have arrived."""
        for _, work in self._pending:
            work.wait()
        self._pending = []


class RowsSpec(NamedTuple):
    """The rows of one table in a message.

    Attributes:
        rows: the number of rows in the message.
        table_rows: the number of rows of the table's shard.
        dtype: the dtype in which rows are sent.
        row: the shape of a row.
    """

    rows: int
    table_rows: int
    dtype: torch.dtype
    row: torch.Size


def number_dtype(table_rows: int) -> torch.dtype:
    """Return the smallest dtype for row numbers: for narrow tables they make up most of a message."""
    return torch.uint16 if table_rows <= 2**16 else torch.int32


def pack_rows(rows: Sequence[Rows]) -> Tensor:
    """Pack row numbers and rows of several tables into one message, bytes of shape (n,)."""
    tensors = list(itertools.chain.from_iterable(rows))
    starts = _aligned([t.nbytes for t in tensors])
    memory = torch.empty(starts[-1], dtype=torch.uint8)
    for tensor, start in zip(tensors, starts, strict=False):
        memory[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    return memory


def receive_rows(
    specs: Sequence[RowsSpec], source: int, tag: int, group: dist.ProcessGroup | None = None
) -> list[Rows]:
    """Receive and unpack a message of :func:`pack_rows`. Nothing is received if ``specs`` has no rows."""
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
    """Return the aligned offsets of consecutive blocks of these sizes, and finally the total size."""
    padded = (-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)
    return list(itertools.accumulate(padded, initial=0))


class PushReceiver:
    """Receives one push per worker at a time, each in the worker's own buffer, in the order in which they arrive.

    Each worker has a thread. Gloo can wait for a message from any sender, but that wait does not end when a connection
    closes.
    """

    def __init__(self, pushes: Mapping[int, Push], group: dist.ProcessGroup):
        """Start to receive.

        Args:
            pushes: the buffer of each worker.
            group: the group through which the workers push.
        """
        self._pushes = pushes
        self._arrived: queue.SimpleQueue[tuple[int, Exception | None]] = queue.SimpleQueue()
        self._free = {worker: threading.Semaphore() for worker in pushes}
        self._ended = False
        for worker in pushes:
            threading.Thread(target=self._receive, args=(worker, group), name=f"push-{worker}", daemon=True).start()

    def next(self) -> tuple[int, Push]:
        """Wait for the next push and return its worker and its buffer, which is in use until :meth:`free`.

        Raises:
            RuntimeError: the connection to a worker is closed.
        """
        worker, error = self._arrived.get()
        if error is not None:
            raise error
        return worker, self._pushes[worker]

    def free(self, worker: int) -> None:
        """Let the worker's buffer be overwritten by its next push."""
        self._free[worker].release()

    def end(self) -> None:
        """Stop the threads. A receive in progress ends when its worker leaves the group."""
        self._ended = True
        for worker in self._free:
            self.free(worker)

    def _receive(self, worker: int, group: dist.ProcessGroup) -> None:
        error: Exception | None = None
        while error is None:
            self._free[worker].acquire()  # without a timeout: the thread is a daemon, and end() ends the wait
            if self._ended:
                return
            try:
                self._pushes[worker].expect(worker, group).wait()
                self._pushes[worker].complete(worker, group)
            except Exception as e:
                error = e.with_traceback(None)  # the traceback would keep the group alive
            self._arrived.put((worker, error))
