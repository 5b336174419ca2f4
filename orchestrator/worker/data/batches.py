"""Which samples a worker reads, and in which order.

The samples of a run form one endless sequence: a permutation of the dataset for epoch 0, another one for epoch 1, and
so on. Each permutation is a pure function of ``(seed, epoch)``, and so are samples drawn by weight or by the job. A
position in the sequence is the number of samples that the whole run has consumed, and a global batch is its next piece.
There is no sampler state to save: any layout continues at the exact next sample. What a dataset or ``collate`` draws at
random is a function of the seed and of the position of the first sample of the batch, in any process.

A dataset that is itself a stream gives its own sequence, epoch after epoch. Every rank reads all of it and collates
only its share, so that the global batches are the same in any layout; :mod:`orchestrator.worker.data.stream` finds
the next sample.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from orchestrator.compat.generators import drawing
from orchestrator.config.eval_splits import VAL, how_to_leave_out
from orchestrator.job import Split
from orchestrator.planning.mesh import even_shares
from orchestrator.strategies.data import datasets
from orchestrator.strategies.data.columns import Columns
from orchestrator.user_code.errors import JobError, error_text
from orchestrator.user_code.results import kind_of
from orchestrator.worker.data.data_loader import (
    BatchReader,
    Collate,
    Collator,
    DataError,
    Loader,
    Loading,
    ReadFailure,
    Slice,
)
from orchestrator.worker.data.fed import Fed, Reader
from orchestrator.worker.data.stream import digest

Batches = Callable[[torch.Generator], Tensor]
"""Draws the global batches of an epoch: int64, shape (batches, global batch size)."""


def epoch_of(samples_consumed: int, n: int | None) -> float | None:
    """Return the position in epochs of a dataset of ``n`` samples, such as 1.5 in the middle of the second epoch.

    None if the number of samples is not known.
    """
    return None if n is None else samples_consumed / n


class SampleOrder:
    """The sequence of sample indices. Caches the order of one epoch, so read it in ascending order.

    Args:
        n: the number of samples in the dataset, and in an epoch.
        seed: the seed of the run.
        weights: draw each sample with a probability in proportion to its weight, and with replacement; float64, shape
            (n,). None for a permutation in each epoch.
        batches: draws the batches of an epoch, of n samples in all, from a generator; None if the job draws none.
        limit: how many samples there are at most: the first ones of the first epoch, in the same order in each epoch.

    Attributes:
        n: the number of samples in an epoch.
    """

    def __init__(
        self,
        *,
        n: int,
        seed: int,
        weights: Tensor | None = None,
        batches: Batches | None = None,
        limit: int | None = None,
    ):
        assert n > 0
        self.n = n if limit is None else min(n, limit)
        self._drawn = n
        self.seed = seed
        self.weights = weights
        self.batches = batches
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def indices(self, start: int, count: int) -> list[int]:
        """Return the entries from ``start`` up to, but not including, ``start + count``."""
        found: list[int] = []
        while len(found) < count:
            epoch, offset = divmod(start + len(found), self.n)
            if self.n < self._drawn:
                epoch = 0
            if epoch != self._epoch:
                self._epoch = epoch
                if self.batches is not None:
                    self._order = self.batches(datasets.epoch_generator(self.seed, epoch)).flatten()
                    self._check_length(epoch)
                elif self.weights is None:
                    self._order = permutation(self._drawn, seed=self.seed, epoch=epoch)
                else:
                    self._order = drawn_by_weight(self.weights, seed=self.seed, epoch=epoch)
            found += self._order[offset : min(self.n, offset + count - len(found))].tolist()
        return found

    def _check_length(self, epoch: int) -> None:
        if len(self._order) != self._drawn:
            raise datasets.DatasetError(
                f"job.batch_sampler: epoch {epoch} has {len(self._order)} samples, and the first had {self._drawn}; "
                "return the same number of batches in every epoch"
            )


def permutation(n: int, *, seed: int, epoch: int) -> Tensor:
    """Return the order of the samples in an epoch: int64, shape (n,)."""
    return torch.randperm(n, generator=datasets.epoch_generator(seed, epoch))


def drawn_by_weight(weights: Tensor, *, seed: int, epoch: int) -> Tensor:
    """Return the samples of an epoch, drawn with replacement: int64, shape (n,), as :func:`permutation` does.

    Not by ``torch.multinomial``, which takes at most 2**24 weights.
    """
    random = datasets.epoch_generator(seed, epoch)
    bounds = weights.cumsum(0)
    points = torch.rand(len(weights), generator=random, dtype=torch.float64) * bounds[-1]
    last = int(weights.nonzero()[-1])  # in case a product is rounded up to the last bound
    return torch.searchsorted(bounds, points, right=True).clamp(max=last)


def checked_weights(weights: Any, dataset: Any) -> Tensor | None:
    """Return the result of ``job.sample_weights("train")`` as float64, of shape (n,) for a dataset of n samples.

    Raises:
        DatasetError: the weights cannot be used with ``dataset``.
    """
    if weights is None:
        return None
    where = "job.sample_weights('train')"
    if datasets.is_stream(dataset):
        raise datasets.DatasetError(
            f"{where}: the samples of a stream cannot be drawn by weight; return None, or a map-style dataset from "
            "job.dataset('train')"
        )
    try:
        values = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as e:
        raise datasets.DatasetError(f"{where} returns {kind_of(weights)} ({e}); return a number for each sample") from e
    if values.shape != (len(dataset),):
        raise datasets.DatasetError(
            f"{where}: shape {tuple(values.shape)}, but the dataset has {len(dataset)} samples; return one weight for "
            "each sample"
        )
    if not bool(values.isfinite().all() and (values >= 0).all() and values.any()):
        raise datasets.DatasetError(f"{where}: weights must be finite and at least 0, and one of them greater than 0")
    return values


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What determines the sequence of samples of a run.

    Attributes:
        seed: the seed of the run.
        weights: the sampling weight of each sample, as :func:`checked_weights` returns them; None for permutations.
        batches: draws the global batches of an epoch from a generator; None if the job draws none.
        limit: see :class:`SampleOrder`.
    """

    seed: int
    weights: Tensor | None = None
    batches: Batches | None = None
    limit: int | None = None

    def order(self, dataset: Any) -> SampleOrder:
        """Return the sequence of the samples of ``dataset``."""
        n = len(dataset) if self.batches is None else self.batches(datasets.epoch_generator(self.seed, 0)).numel()
        return SampleOrder(n=n, seed=self.seed, weights=self.weights, batches=self.batches, limit=self.limit)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of each global batch that a rank reads, in samples.

    A rank takes a contiguous share of the global batch and cuts it into ``grad_accumulation`` contiguous micro-batches.
    Sizes differ by at most one sample.
    """

    global_batch_size: int
    data_parallel_size: int
    dp_rank: int
    grad_accumulation: int


def train_batches(
    dataset: Dataset[Any] | Reader,
    sampling: Sampling,
    share: Share,
    loading: Loading,
    *,
    samples_consumed: int,
    steps: int,
    read: bool = True,
) -> Generator[list[Any], None, None]:
    """Yield this rank's micro-batches, collated, for each of ``steps`` steps.

    Call ``close()`` on the generator to end its loader processes.

    Args:
        dataset: a map-style dataset, or the reader of a stream at ``samples_consumed``.
        sampling: the sequence of samples.
        share: the part of this rank.
        loading: how to load it. A stream is read in this thread in any case, and loader processes collate its samples.
        samples_consumed: the position of the first step in the sequence of samples.
        read: False on a rank that needs no data; each micro-batch is then None.

    Raises:
        DataError: while iterating, if a sample cannot be read, or if a loader process has died or hangs.
        JobError: while iterating, if no attempt could make a batch of the samples.
    """
    global_batch_size, batches = share.global_batch_size, sampling.batches
    shares = even_shares(global_batch_size, share.data_parallel_size)
    sizes = even_shares(shares[share.dp_rank], share.grad_accumulation)
    assert min(sizes) > 0, "the plan gives every micro-batch at least one sample"
    offsets = list(itertools.accumulate(sizes, initial=sum(shares[: share.dp_rank])))

    def seed_at(position: int) -> int:
        return datasets.mix(sampling.seed, "train", position)

    def indices(dataset: Any) -> Iterator[tuple[int, list[int]]]:
        if batches is not None and samples_consumed % global_batch_size:
            raise datasets.DatasetError(
                f"train.global_batch_size={global_batch_size}: the run has read {samples_consumed} samples in batches "
                "of job.batch_sampler, not a multiple of this; continue with the batch size so far"
            )
        order = sampling.order(dataset)
        for step in range(steps):
            start = samples_consumed + step * global_batch_size
            for offset, size in zip(offsets, sizes, strict=False):
                yield seed_at(start + offset), order.indices(start + offset, size)

    def slices(stream: Reader) -> Iterator[tuple[int, Slice | ReadFailure]]:
        for _ in range(steps):
            start, first = stream.position, offsets[0]
            try:
                items = stream.read(global_batch_size, first=first, end=offsets[-1])
            except (DataError, JobError) as e:
                yield 0, ReadFailure.of(e)
                return
            for offset, size in zip(offsets, sizes, strict=False):
                samples = Slice(items[offset - first : offset - first + size], start + offset)
                yield seed_at(samples.start), samples

    if not read:
        yield from itertools.repeat([None] * share.grad_accumulation, steps)
        return
    function = functools.partial(datasets.make_batch, loading.collate)
    reader: BatchReader | Collator
    elements: Iterator[tuple[int, Any]]
    if isinstance(dataset, Reader):
        reader, elements = Collator(function, "train", loading.collate is not None), slices(dataset)
    else:
        reader, elements = BatchReader(dataset, function, "train"), indices(dataset)
    loader = Loader(reader, loading, seed=datasets.mix(sampling.seed, samples_consumed, share.dp_rank))
    with contextlib.closing(loader):
        read_batches = loader.read(elements)
        while step := list(itertools.islice(read_batches, share.grad_accumulation)):
            yield step


@dataclass(frozen=True)
class Padded:
    """Collates samples to a batch of ``rows``, whose last ones repeat a sample. A whole batch has all rows already."""

    collate: Collate
    rows: int
    pad_ragged: bool

    def __call__(self, items: list[Any]) -> Any:
        if not isinstance(items, (list, Columns)) or len(items) == self.rows:
            return self.collate(items)
        padded = items.padded(self.rows) if isinstance(items, Columns) else None
        batch = self.collate([*items, *items[-1:] * (self.rows - len(items))] if padded is None else padded)
        if self.pad_ragged or not datasets.is_ragged(batch, self.rows):
            return batch
        return self.collate(items)


class EvalBatches:
    """This rank's share of the data of ``split``, in order. Each pass yields ``(batch, number of valid leading rows)``.

    ``kept``: the samples to evaluate, or for a stream, as many of its first ones; None for all.

    Every rank yields the same number of batches, each of ``batch_size`` rows. Rows that are not valid repeat some
    sample; batches without a row for each sample get none, unless ``pad_ragged``. Over all ranks, each sample is valid
    exactly once. Loader processes stay until :meth:`close`, for further passes. What is drawn at random depends on
    ``seed`` and is the same in each pass. The other arguments, and the errors, are those of :func:`train_batches`.
    """

    def __init__(
        self,
        dataset: Any,
        loading: Loading,
        *,
        batch_size: int,
        data_parallel_size: int,
        dp_rank: int,
        read: bool = True,
        split: Split = VAL,
        kept: Sequence[int] | None = None,
        pad_ragged: bool = False,
        seed: int = 0,
    ):
        datasets.check_dataset(dataset, split=split)
        self._split = split
        self._dataset = dataset
        self._seed = seed
        self._batch_size = batch_size
        self._data_parallel_size = data_parallel_size
        self._dp_rank = dp_rank
        self._read = read
        self._streamed = datasets.is_stream(dataset)
        function = Padded(functools.partial(datasets.make_batch, loading.collate), batch_size, pad_ragged)
        self.num_batches: int | None = None
        self.first_read: tuple[int, str] | None = None
        self._kept = range(len(dataset)) if kept is None and not self._streamed else kept
        if self._kept is not None and not self._streamed:
            self.num_batches = math.ceil(even_shares(len(self._kept), data_parallel_size)[0] / batch_size)
            loading = replace(loading, num_workers=min(loading.num_workers, self.num_batches))
        self._loader = Loader(
            Collator(function, split, loading.collate is not None)
            if self._streamed
            else BatchReader(dataset, function, split, batch_size),
            loading,
            seed=datasets.mix(seed, split, dp_rank),
        )

    def __iter__(self) -> Generator[tuple[Any, int], None, None]:
        return self._read_batches(only_ends=False)

    def ends(self) -> Generator[tuple[Any, int], None, None]:
        """Yield the first batch and the last one, which has the fewest valid rows; of a stream, only the first."""
        return self._read_batches(only_ends=True)

    def _read_batches(self, *, only_ends: bool) -> Generator[tuple[Any, int], None, None]:
        counts: deque[int] = deque()
        if self._streamed:
            elements: Iterator[Any] = itertools.islice(self._slices(counts), 1 if only_ends else None)
        else:
            elements = self._indices(counts, only_ends=only_ends)
        batches: Generator[Any, None, None] = self._loader.read(elements) if self._read else (None for _ in elements)
        with contextlib.closing(batches):
            for batch in batches:
                yield batch, counts.popleft()

    def close(self) -> None:
        """End the loader processes. A later pass starts new ones."""
        self._loader.close()

    def _first_samples(self) -> Iterator[Any]:
        return itertools.islice(self._dataset, None if self._kept is None else len(self._kept))

    def _seed_at(self, position: int) -> int:
        return datasets.mix(self._seed, self._split, position)

    def _indices(self, counts: deque[int], *, only_ends: bool) -> Iterator[tuple[int, list[int]]]:
        """Yield the indices of each batch of a map-style dataset; ``counts`` receives how many of them are valid."""
        assert self._kept is not None
        n = len(self._kept)
        shares = even_shares(n, self._data_parallel_size)
        first = sum(shares[: self._dp_rank])
        end = first + shares[self._dp_rank]
        starts = range(first, first + shares[0], self._batch_size)
        for start in sorted({starts[0], starts[-1]}) if only_ends else starts:
            counts.append(max(0, min(end - start, self._batch_size)))
            yield self._seed_at(start), list(self._kept[start : start + counts[-1]]) or [self._kept[-1]]

    def _slices(self, counts: deque[int]) -> Iterator[tuple[int, Slice | ReadFailure]]:
        """Yield the samples of each batch of a stream; ``counts`` receives how many of them are valid."""
        start, first, end = 0, self._dp_rank * self._batch_size, (self._dp_rank + 1) * self._batch_size
        samples: Iterator[Any] | None = None
        items: Sequence[Any]
        while True:
            try:
                with drawing(datasets.mix(self._seed, self._split, "stream", start)):
                    total = self._batch_size * self._data_parallel_size
                    if isinstance(self._dataset, Fed):
                        total = total if self._kept is None else min(total, len(self._kept) - start)
                        read, items = self._dataset.part(start, total, first=first, end=end)
                    else:
                        samples = self._first_samples() if samples is None else samples
                        whole = list(itertools.islice(samples, total))
                        read, items = len(whole), whole[first:end] or whole[-1:]
                        self.first_read = self.first_read or (start, digest(whole))
            except (DataError, JobError) as e:
                counts.append(0)
                yield 0, ReadFailure.of(e)
                return
            except Exception as e:
                counts.append(0)
                text = f"{self._split} data, in the stream: {error_text(e)}"
                yield 0, ReadFailure(text, traceback.format_exc())
                return
            if not read:
                if start == 0:
                    remedy = how_to_leave_out(self._split)
                    text = f"{self._split} data: the stream has no samples; for no evaluation, {remedy}"
                    counts.append(0)
                    yield 0, ReadFailure(text)
                return
            counts.append(max(0, min(read, end) - first))
            yield self._seed_at(start + first), Slice(items, start + first)
            start += read
