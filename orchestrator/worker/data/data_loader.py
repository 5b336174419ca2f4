"""Reading the samples of a batch, in this thread or in loader processes; and batches of samples of similar length."""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from orchestrator.compat.generators import drawing
from orchestrator.compat.loader_processes import end_loader_processes, loader_exit_codes, loader_failure
from orchestrator.config.text import first_few
from orchestrator.job import Split
from orchestrator.model.failed_call import failed_call
from orchestrator.records.lock import end_with_parent
from orchestrator.strategies.data.columns import Columns
from orchestrator.strategies.data.datasets import unlike_sample
from orchestrator.user_code.errors import JobError, error_text, exits_refused
from orchestrator.user_code.own_errors import OwnError

Collate = Callable[[list[Any]], Any]

_POLL_S = 1.0
_TERMINATE_AFTER_S = 0.5


class DataError(RuntimeError):
    """A sample could not be read. The message names the split, the index and the cause.

    Attributes:
        own_error: the error of the dataset, if another process has raised it.
    """

    own_error: OwnError | None = None


class LoaderError(DataError):
    """A loader process has died or hangs."""


@dataclass(frozen=True)
class BatchReader(Dataset[Any]):
    """A dataset whose item for a list of indices is the collated batch.

    A dataset that returns whole batches is asked for ``rows`` samples, the last of ``indices`` again and again. With
    single samples, ``collate`` can do the same.

    A loader process returns an error as a :class:`ReadFailure`, because only its text can be pickled safely.

    Raises:
        DataError: on access, if reading a sample or collating fails.
        JobError: on access, if no attempt could make a batch of the samples.
    """

    dataset: Dataset[Any]
    collate: Collate
    split: Split
    rows: int = 0

    def __getitem__(self, indices: list[int]) -> Any:
        try:
            what = f"{self.split} data, collating samples [{first_few([*map(str, indices)], 4)}]"
            return _collated(self.collate, self._items(indices), indices, what)
        except (DataError, JobError) as e:
            if get_worker_info() is None:
                raise
            return ReadFailure.of(e)

    def _items(self, indices: list[int]) -> list[Any]:
        dataset = self.dataset
        if hasattr(dataset, "__getitems__"):
            return self._items_at_once(indices, dataset.__getitems__)
        items: list[Any] = []
        index = -1
        try:
            with exits_refused():
                for index in indices:
                    items.append(dataset[index])
        except Exception as e:
            raise self._error(f"sample {index}", e) from e
        return items

    def _items_at_once(self, indices: list[int], fetch: Callable[[list[int]], list[Any]]) -> list[Any]:
        missing = self.rows - len(indices)
        try:
            with exits_refused():
                items = fetch(indices)
                if missing > 0 and not isinstance(items, list):
                    items = fetch([*indices, *indices[-1:] * missing])
                return items
        except Exception as e:
            for index in indices:  # one at a time, to find the sample that fails
                try:
                    with exits_refused():
                        fetch([index])
                except Exception as cause:
                    raise self._error(f"sample {index}", cause) from cause
            raise self._error(f"samples {indices}", e) from e

    def _error(self, what: str, cause: Exception) -> DataError | JobError:
        return _read_error(f"{self.split} data, {what}: {error_text(cause)}", cause)


@dataclass(frozen=True)
class Slice:
    """Consecutive samples of a stream, the first of them number ``start``."""

    items: Sequence[Any]
    start: int


@dataclass(frozen=True)
class Collator(Dataset[Any]):
    """A dataset whose item for a :class:`Slice` is the collated batch. It passes on a :class:`ReadFailure`.

    The stream itself is read by the training thread; loader processes only collate.

    Attributes:
        has_own: whether ``collate`` calls a function of the job.

    Raises:
        DataError: on access, if collating fails.
        JobError: on access, if no attempt could make a batch of the samples.
    """

    collate: Collate
    split: Split
    has_own: bool

    def draws(self, samples: Slice | ReadFailure) -> bool:
        """Return whether making the batch may draw random numbers: columns become tensors without a call of the job."""
        return self.has_own or not (isinstance(samples, Slice) and isinstance(samples.items, Columns))

    def __getitem__(self, samples: Slice | ReadFailure) -> Any:
        if isinstance(samples, ReadFailure):
            return samples
        numbers = range(samples.start, samples.start + len(samples.items))
        what = f"{self.split} data, collating samples {numbers[0]} to {numbers[-1]} of the stream"
        try:
            return _collated(self.collate, samples.items, numbers, what)
        except (DataError, JobError) as e:
            if get_worker_info() is None:
                raise
            return ReadFailure.of(e)


@dataclass(frozen=True)
class ReadFailure:
    """An error as text, in place of a batch: of a loader process, or of a batch that is read ahead."""

    message: str
    traceback: str = ""
    is_of_job: bool = False
    own_error: OwnError | None = None

    @classmethod
    def of(cls, error: DataError | JobError) -> ReadFailure:
        """Return the error that is handled as text."""
        return cls(str(error), traceback.format_exc(), isinstance(error, JobError), failed_call(error))

    def error(self) -> DataError | JobError:
        """Return the error to raise in the training thread."""
        error = JobError(self.message) if self.is_of_job else DataError(self.message)
        if isinstance(error, DataError):
            error.own_error = self.own_error
        error.__cause__ = RuntimeError(f"while reading ahead:\n{self.traceback}")
        return error


@dataclass(frozen=True)
class _Drawing(Dataset[Any]):
    """A reader whose elements come with a seed: what a batch draws depends neither on the process nor on the past."""

    reader: BatchReader | Collator

    def __getitem__(self, seeded: tuple[int, Any]) -> Any:
        seed, element = seeded
        draws = not isinstance(self.reader, Collator) or self.reader.draws(element)
        with drawing(seed) if draws else contextlib.nullcontext():
            return self.reader[element]


class _Pass:
    """The elements of one pass of a :class:`Loader`, which torch takes for a sampler."""

    def __init__(self) -> None:
        self.elements: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How batches are loaded.

    Attributes:
        collate: makes a batch of samples; None for torch's default.
        num_workers: loader processes; 0 reads in the calling thread.
        pin_memory: whether batches are in memory from which copies to a GPU run in the background.
        timeout_s: the longest wait for a batch of a loader process.
    """

    collate: Collate | None
    num_workers: int
    pin_memory: bool
    timeout_s: float


class Loader:
    """Reads batches pass by pass, in this thread or in loader processes that read ahead.

    The processes start with the first batch, stay for further passes, and end with :meth:`close` or an unfinished pass.
    """

    def __init__(self, reader: BatchReader | Collator, loading: Loading, *, seed: int):
        """
        Args:
            reader: returns a batch, given an element of a pass.
            loading: how; ``reader`` collates.
            seed: the seed that torch tells loader processes (``get_worker_info``).
        """
        self._reader = reader
        self._seed = seed
        self._num_workers = loading.num_workers
        self._pin_memory = loading.pin_memory
        self._timeout_s = loading.timeout_s
        self._pass = _Pass()
        self._loader: DataLoader[Any] | None = None
        self._iterator: Iterator[Any] | None = None

    def read(self, elements: Iterable[tuple[int, Any]]) -> Generator[Any, None, None]:
        """Yield the batch for each of ``elements``, in order. One pass ends before the next one begins.

        Args:
            elements: lists of indices, or slices of a stream, each after the seed of what is drawn for it. This thread
                iterates over them, ahead of the loader processes.

        Raises:
            DataError: while iterating, if a sample cannot be read.
            LoaderError: while iterating, if a loader process has died or hangs.
            JobError: while iterating, if no attempt could make a batch of the samples.
        """
        self._pass.elements = elements
        finished = False
        try:
            iterator = self._begin_pass()
            while True:
                try:
                    batch = _next(iterator, self._timeout_s)
                except StopIteration:
                    finished = True
                    return
                if isinstance(batch, ReadFailure):
                    raise batch.error()
                yield batch
        finally:
            # Now, because a traceback may keep the last reference for a long time.
            if not finished:
                self.close()

    def close(self) -> None:
        """End the loader processes. A later pass starts new ones."""
        if self._num_workers and self._iterator is not None:
            end_loader_processes(self._iterator, terminate_after_s=_TERMINATE_AFTER_S)
        self._loader = self._iterator = None

    def _begin_pass(self) -> Iterator[Any]:
        if self._iterator is not None and self._loader is not None:
            try:
                return iter(self._loader)
            except RuntimeError as e:
                if loader_failure(e) is None:
                    raise
                self.close()  # a process that was idle has died or does not answer
        self._loader = self._make_loader()
        self._iterator = iter(self._loader)
        return self._iterator

    def _make_loader(self) -> DataLoader[Any]:
        return DataLoader(
            _Drawing(self._reader),
            sampler=self._pass,
            batch_size=None,  # an item of the reader is a batch already
            collate_fn=_unchanged,
            num_workers=self._num_workers,
            persistent_workers=self._num_workers > 0,
            pin_memory=self._pin_memory,
            timeout=min(_POLL_S, self._timeout_s) if self._num_workers else 0,
            worker_init_fn=_init_loader_process,
            # A separate generator: starting a loader must not advance the global one, which dropout draws from.
            generator=torch.Generator().manual_seed(self._seed),
        )


def _read_error(text: str, cause: Exception) -> DataError | JobError:
    return JobError(text) if isinstance(cause, JobError) else DataError(text)


def _collated(collate: Collate, items: Any, numbers: Sequence[int], what: str) -> Any:
    """Return the batch of ``items``, the samples ``numbers``. ``what`` begins the message of an error."""
    try:
        with exits_refused():
            return collate(items)
    except Exception as e:
        empty = [n for n, item in zip(numbers, items, strict=False) if item is None] if isinstance(items, list) else []
        if empty:
            why = "" if isinstance(e, JobError) else f" ({error_text(e)})"
            remedy = "return a sample, or leave it out in the function of job.collate"
            raise JobError(f"{what}: the dataset returns None for sample {empty[0]}{why}; {remedy}") from e
        unlike = unlike_sample(items)
        differs = f"; sample {numbers[unlike[0]]} is {unlike[1]}, sample {numbers[0]} {unlike[2]}" if unlike else ""
        raise _read_error(f"{what}: {error_text(e)}{differs}", e) from e


def _next(iterator: Iterator[Any], timeout_s: float) -> Any:
    """Return the next batch. Poll, because outside the main thread torch notices a dead process only at a timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return next(iterator)
        except DataError:
            raise
        except (ConnectionError, EOFError) as e:  # the process has ended before its batch was received
            raise LoaderError(_death(iterator, f"its batch was not received: {type(e).__name__}")) from e
        except RuntimeError as e:
            failure = loader_failure(e)
            if failure is None:
                raise
            if failure == "died":
                raise LoaderError(_death(iterator, str(e))) from e
            if time.monotonic() >= deadline:
                raise LoaderError(
                    f"no batch within {timeout_s:g} s: the dataset is too slow or hangs; "
                    "raise data.num_workers, or set data.num_workers=0 to see where it hangs"
                ) from e


def _death(iterator: Iterator[Any], text: str) -> str:
    codes = loader_exit_codes(iterator)
    how = f"was killed by {signal.Signals(-codes[0]).name}" if codes and codes[0] < 0 else "ended"
    return (
        f"a loader process {how} ({text.rstrip('. ')}); "
        "if it ran out of memory, lower data.num_workers (0 reads in the training thread); if code of the dataset "
        "calls os._exit(), raise an exception there"
    )


def _init_loader_process(worker_id: int) -> None:
    """Make a loader process survive Ctrl-C, but not its worker.

    After Ctrl-C, the steps up to the last checkpoint still need data. An orphan would keep the sockets of its dead
    worker open, so that the other ranks would not notice the death.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)


def _unchanged(batch: Any) -> Any:
    return batch


def batches_by_length(
    lengths: Sequence[int] | Tensor, batch_size: int, generator: torch.Generator, *, pool: int = 50
) -> list[list[int]]:
    """Return the batches of an epoch, each of samples of similar length; for ``Job.batch_sampler``.

    The samples are shuffled and cut into pools. Each pool is sorted by length and cut into batches, which are then
    shuffled. What does not fill a batch is left out, in each epoch other samples.

    Args:
        lengths: the length of each sample.
        batch_size: the number of samples in a batch.
        generator: what to draw the order from.
        pool: the number of batches in a pool. More make the lengths in a batch more alike, and fewer the order more
            random.
    """
    of_samples = torch.as_tensor(lengths)
    kept = len(of_samples) // batch_size * batch_size
    order = torch.randperm(len(of_samples), generator=generator)[:kept]
    pools = [part[of_samples[part].argsort(stable=True)] for part in order.split(pool * batch_size)]
    batches = torch.cat(pools).view(-1, batch_size) if pools else order.view(0, batch_size)
    shuffled: list[list[int]] = batches[torch.randperm(len(batches), generator=generator)].tolist()
    return shuffled
