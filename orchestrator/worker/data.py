"""Which samples a worker reads, in which order, and the processes that read them.

The samples of a run are one endless stream: a permutation of the dataset for epoch 0, another for
epoch 1, and so on, each a pure function of ``(seed, epoch)``. A position is the number of samples
consumed by the whole run, and a global batch is the next piece of the stream. So there is no
sampler state to save: any layout continues at the exact next sample.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    default_collate,
    get_worker_info,
)

from orchestrator.job import Split
from orchestrator.planning.mesh import even_shares

Collate = Callable[[list[Any]], Any]

_POLL_S = 1.0
_CLOSE_S = 0.5
_PR_SET_PDEATHSIG = 1


class DataError(RuntimeError):
    """A sample could not be read; the text names the split, the index and the cause."""


def epoch_of(samples_consumed: int, n: int) -> float:
    """Epochs of a dataset of ``n`` samples, e.g. 1.5 in the middle of the second."""
    return samples_consumed / n


def dataset_size(dataset: Dataset[Any], *, split: Split) -> int:
    """Number of samples.

    Raises:
        ValueError: the dataset is empty or not map-style.
    """
    named = f"job.dataset({split!r})"
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(f"{named}: {type(dataset).__name__} must be a map-style dataset, with __len__ and __getitem__")
    n = len(dataset)
    if n == 0:
        raise ValueError(f"{named}: is empty; give it at least one sample")
    return n


class SampleOrder:
    """The stream of sample indices. Holds the permutation of one epoch; read it forwards."""

    def __init__(self, *, n: int, seed: int):
        assert n > 0
        self.n = n
        self.seed = seed
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.int64)

    def indices(self, start: int, count: int) -> list[int]:
        """Entries ``start`` to ``start + count`` of the stream."""
        found: list[int] = []
        while len(found) < count:
            epoch, offset = divmod(start + len(found), self.n)
            if epoch != self._epoch:
                self._epoch = epoch
                self._permutation = permutation(self.n, seed=self.seed, epoch=epoch)
            found += self._permutation[offset : offset + count - len(found)].tolist()
        return found


def permutation(n: int, *, seed: int, epoch: int) -> Tensor:
    """The order of the samples in an epoch: int64, shape (n,)."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(_mix(seed, epoch)))


def _mix(*values: int) -> int:
    """63 bits that depend on every value and on their order."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def train_batches(
    dataset: Dataset[Any],
    *,
    collate: Collate | None,
    seed: int,
    samples_consumed: int,
    steps: int,
    global_batch_size: int,
    data_parallel_size: int,
    dp_rank: int,
    grad_accumulation: int,
    num_workers: int,
    pin_memory: bool,
    timeout_s: float,
    read: bool = True,
) -> Generator[list[Any], None, None]:
    """For each of ``steps`` steps, this rank's micro-batches, as ``collate`` returns them; Nones if not to ``read``.

    A rank takes a contiguous share of the global batch and cuts it into ``grad_accumulation``
    contiguous slices; sizes differ by at most one sample. Loader processes start with the first
    batch and end with the generator: ``close()`` it. ``timeout_s`` is the longest wait for a batch
    of theirs.

    Raises:
        ValueError: the dataset is empty or not map-style.
        DataError: while iterating, a sample that cannot be read, or a loader process that died or
            stands still.
    """
    n = dataset_size(dataset, split="train")
    shares = even_shares(global_batch_size, data_parallel_size)
    sizes = even_shares(shares[dp_rank], grad_accumulation)
    assert min(sizes) > 0, "the plan gives every micro-batch at least one sample"
    offsets = list(itertools.accumulate(sizes, initial=sum(shares[:dp_rank])))

    def micro_batches() -> Iterator[list[int]]:
        order = SampleOrder(n=n, seed=seed)
        for step in range(steps):
            start = samples_consumed + step * global_batch_size
            for offset, size in zip(offsets, sizes, strict=False):
                yield order.indices(start + offset, size)

    def by_step() -> Generator[list[Any], None, None]:
        if not read:
            yield from itertools.repeat([None] * grad_accumulation, steps)
            return
        batches = _load(
            _BatchReader(dataset, collate or default_collate, "train"),
            micro_batches(),
            seed=_mix(seed, samples_consumed, dp_rank),
            num_workers=num_workers,
            pin_memory=pin_memory,
            timeout_s=timeout_s,
        )
        try:
            while step := list(itertools.islice(batches, grad_accumulation)):
                yield step
        finally:
            batches.close()

    return by_step()


def eval_batches(
    dataset: Dataset[Any],
    *,
    collate: Collate | None,
    batch_size: int,
    data_parallel_size: int,
    dp_rank: int,
    num_workers: int,
    pin_memory: bool,
    timeout_s: float,
    read: bool = True,
) -> Generator[tuple[Any, int], None, None]:
    """This rank's share of the validation set, in order: ``(batch, number of valid leading rows)``; a batch is None
    if not to ``read``.

    Every rank yields the same number of batches, each of ``batch_size`` rows; rows that are not
    valid repeat some sample. Over all ranks each sample is valid exactly once. Raises as
    :func:`train_batches` does.
    """
    n = dataset_size(dataset, split="val")
    shares = even_shares(n, data_parallel_size)
    first = sum(shares[:dp_rank])
    end = first + shares[dp_rank]
    starts = [first + k * batch_size for k in range(math.ceil(shares[0] / batch_size))]

    def with_counts() -> Generator[tuple[Any, int], None, None]:
        counts = [max(0, min(end - start, batch_size)) for start in starts]
        if not read:
            yield from ((None, count) for count in counts)
            return
        batches = _load(
            _BatchReader(dataset, collate or default_collate, "val"),
            ([min(i, n - 1) for i in range(start, start + batch_size)] for start in starts),
            seed=_mix(dp_rank),
            num_workers=min(num_workers, len(starts)),
            pin_memory=pin_memory,
            timeout_s=timeout_s,
        )
        try:
            yield from zip(batches, counts, strict=True)
        finally:
            batches.close()

    return with_counts()


@dataclass(frozen=True)
class _Failure:
    """A :class:`DataError` on its way out of a loader process, where only its text can travel."""

    message: str
    traceback: str


@dataclass(frozen=True)
class _BatchReader(Dataset[Any]):
    """Indices of a batch -> the collated batch, so that one ``try`` knows what it was reading."""

    dataset: Dataset[Any]
    collate: Collate
    split: Split

    def __getitem__(self, indices: list[int]) -> Any:
        try:
            return self._collated(self._items(indices), indices)
        except DataError as e:
            if get_worker_info() is None:
                raise
            return _Failure(str(e), traceback.format_exc())

    def _items(self, indices: list[int]) -> list[Any]:
        dataset = self.dataset
        if hasattr(dataset, "__getitems__"):
            return self._items_at_once(indices, dataset.__getitems__)
        items: list[Any] = []
        index = -1
        try:
            for index in indices:
                items.append(dataset[index])
        except Exception as e:
            raise self._error(f"sample {index}", e) from e
        return items

    def _items_at_once(self, indices: list[int], fetch: Callable[[list[int]], list[Any]]) -> list[Any]:
        try:
            return fetch(indices)
        except Exception as e:
            for index in indices:  # one by one, to name the culprit
                try:
                    fetch([index])
                except Exception as cause:
                    raise self._error(f"sample {index}", cause) from cause
            raise self._error(f"samples {indices}", e) from e

    def _collated(self, items: list[Any], indices: list[int]) -> Any:
        try:
            return self.collate(items)
        except Exception as e:
            raise self._error(f"collating samples {indices}", e) from e

    def _error(self, what: str, cause: Exception) -> DataError:
        return DataError(f"{self.split} data, {what}: {type(cause).__name__}: {cause}")


def _load(
    reader: _BatchReader,
    batches: Iterable[list[int]],
    *,
    seed: int,
    num_workers: int,
    pin_memory: bool,
    timeout_s: float,
) -> Generator[Any, None, None]:
    """Every batch of indices, read; in ``num_workers`` loader processes that read ahead."""
    loader = DataLoader(
        reader,
        sampler=batches,
        batch_size=None,  # an item of the reader is a batch already
        collate_fn=_as_is,
        num_workers=num_workers,
        pin_memory=pin_memory,
        timeout=min(_POLL_S, timeout_s) if num_workers else 0,
        worker_init_fn=_init_loader_process,
        # Its own generator: starting a loader must not move the global one, which draws dropout.
        generator=torch.Generator().manual_seed(seed),
    )
    iterator = iter(loader)
    try:
        while True:
            try:
                batch = _next(iterator, timeout_s)
            except StopIteration:
                return
            if isinstance(batch, _Failure):
                raise DataError(batch.message) from RuntimeError(f"in a loader process:\n{batch.traceback}")
            yield batch
    finally:
        # At once, and not when the last reference goes, which a traceback may hold.
        if num_workers:
            _end_loader_processes(iterator)


def _next(iterator: Iterator[Any], timeout_s: float) -> Any:
    """The next batch.

    Asks in short turns: outside the main thread torch sees a dead process only between them.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return next(iterator)
        except DataError:
            raise
        except RuntimeError as e:
            text = str(e)
            if text.startswith("DataLoader worker"):
                raise DataError(_death(iterator, text)) from e
            if not text.startswith("DataLoader timed out"):
                raise
            if time.monotonic() >= deadline:
                raise DataError(
                    f"no batch within {timeout_s:g} s: the dataset is too slow or hangs; "
                    "raise data.num_workers, or set data.num_workers=0 to see where it stands"
                ) from e


def _death(iterator: Iterator[Any], text: str) -> str:
    codes = [w.exitcode for w in getattr(iterator, "_workers", ()) if w.exitcode]
    how = f"was killed by {signal.Signals(-codes[0]).name}" if codes and codes[0] < 0 else "died"
    return (
        f"a loader process {how} ({text.rstrip('. ')}); "
        "where memory ran out, lower data.num_workers (0 reads in the training thread)"
    )


def _end_loader_processes(iterator: Any) -> None:
    """Ask them to end; one that is in the middle of a long read is told so after ``_CLOSE_S``."""
    processes = iterator._workers
    overdue = threading.Timer(_CLOSE_S, lambda: [p.terminate() for p in processes])
    overdue.start()
    try:
        iterator._shutdown_workers()
    finally:
        overdue.cancel()


def _init_loader_process(worker_id: int) -> None:
    """A loader process outlives Ctrl-C, for the steps before the last checkpoint, but not its worker.

    An orphan would hold the worker's sockets open and hide its death from the other ranks.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _as_is(batch: Any) -> Any:
    return batch
