"""Which samples a worker reads, and in which order.

The samples of a run form one endless stream: a permutation of the dataset for epoch 0, another one for epoch 1, and so
on. Each permutation is a pure function of ``(seed, epoch)``. A position in the stream is the number of samples that the
whole run has consumed, and a global batch is the next piece of the stream. There is no sampler state to save: any
layout continues at the exact next sample.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from orchestrator.job import Split
from orchestrator.planning.mesh import even_shares
from orchestrator.worker.loader import BatchReader, Collate, load


def epoch_of(samples_consumed: int, n: int) -> float:
    """Return the position in epochs of a dataset of ``n`` samples, such as 1.5 in the middle of the second epoch."""
    return samples_consumed / n


def dataset_size(dataset: Dataset[Any], *, split: Split) -> int:
    """Return the number of samples.

    Raises:
        ValueError: the dataset is empty or not map-style.
    """
    where = f"job.dataset({split!r})"
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(f"{where}: {type(dataset).__name__} must be a map-style dataset, with __len__ and __getitem__")
    n = len(dataset)
    if n == 0:
        raise ValueError(f"{where}: the dataset is empty; give it at least one sample")
    return n


class SampleOrder:
    """The stream of sample indices. Caches the permutation of one epoch, so read it in ascending order."""

    def __init__(self, *, n: int, seed: int):
        assert n > 0
        self.n = n
        self.seed = seed
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.int64)

    def indices(self, start: int, count: int) -> list[int]:
        """Return the entries from ``start`` up to, but not including, ``start + count``."""
        found: list[int] = []
        while len(found) < count:
            epoch, offset = divmod(start + len(found), self.n)
            if epoch != self._epoch:
                self._epoch = epoch
                self._permutation = permutation(self.n, seed=self.seed, epoch=epoch)
            found += self._permutation[offset : offset + count - len(found)].tolist()
        return found


def permutation(n: int, *, seed: int, epoch: int) -> Tensor:
    """Return the order of the samples in an epoch: int64, shape (n,)."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(_mix(seed, epoch)))


def _mix(*values: int) -> int:
    """Return 63 bits that depend on every value and on their order."""
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
    """Yield this rank's micro-batches, as ``collate`` returns them, for each of ``steps`` steps.

    A rank takes a contiguous share of the global batch and cuts it into ``grad_accumulation`` contiguous micro-batches.
    Sizes differ by at most one sample. Call ``close()`` on the generator to end its loader processes.

    Args:
        collate: None for torch's default.
        samples_consumed: the position of the first step in the stream.
        num_workers: loader processes; 0 reads in this thread.
        timeout_s: the longest wait for a batch of a loader process.
        read: False on a rank that needs no data; each micro-batch is then None.

    Raises:
        ValueError: the dataset is empty or not map-style.
        DataError: while iterating, if a sample cannot be read, or if a loader process has died or hangs.
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
        batches = load(
            BatchReader(dataset, collate or default_collate, "train"),
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

    return by_step()  # a generator of its own, so that a bad dataset is an error at the call


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
    """Yield this rank's share of the validation set, in order, as ``(batch, number of valid leading rows)``.

    Every rank yields the same number of batches, each of ``batch_size`` rows. Rows that are not valid repeat some
    sample. Over all ranks, each sample is valid exactly once. The arguments and errors are those of
    :func:`train_batches`.
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
        batches = load(
            BatchReader(dataset, collate or default_collate, "val"),
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
