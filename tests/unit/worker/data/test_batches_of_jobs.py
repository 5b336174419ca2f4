"""Batches that a job makes itself."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from helpers.conformance.cases import having
from helpers.files.golden import Golden
from helpers.jobs.toys import Toy
from helpers.ranks.batches import LAYOUTS, Numbers, Streamed, read_by_all_ranks, train
from orchestrator.job import Job, Split
from orchestrator.strategies.data.datasets import DatasetError, epoch_generator, is_stream, samples_per_epoch
from orchestrator.worker.data.batches import Batches, SampleOrder, checked_weights
from orchestrator.worker.data.data_loader import batches_by_length
from orchestrator.worker.data.opened import Datasets, batches_of


class Bucketed(Toy):
    """Batches of numbers of similar size, which stands for their length."""

    def batch_sampler(self, dataset: Any, batch_size: int, generator: torch.Generator) -> list[list[int]]:
        return batches_by_length([i % 10 for i in range(len(dataset))], batch_size, generator, pool=3)


def drawn(job: Job, n: int, batch_size: int) -> Batches | None:
    datasets = Datasets(
        train=Numbers(n), evaluated={}, weights=checked_weights(job.sample_weights("train"), Numbers(n))
    )
    return batches_of(job, datasets, batch_size)


@pytest.mark.parametrize(("dp_size", "accumulation"), LAYOUTS)
@pytest.mark.parametrize("done", [0, 4, 11])
def test_any_layout_has_the_batches_of_the_job_and_resumes_at_the_next(
    dp_size: int, accumulation: int, done: int
) -> None:
    read = functools.partial(
        read_by_all_ranks, lambda: Numbers(100), seed=5, global_batch_size=13, batches=drawn(Bucketed(), 100, 13)
    )
    whole = read(data_parallel_size=1, steps=14)
    assert (
        read(data_parallel_size=dp_size, grad_accumulation=accumulation, samples_consumed=done * 13, steps=14 - done)
        == whole[done:]
    )
    first, second = (Bucketed().batch_sampler(Numbers(100), 13, epoch_generator(5, epoch)) for epoch in (0, 1))
    assert whole == first + second, "an epoch has seven whole batches of 100 samples"
    assert first != second
    assert max(len({i % 10 for i in batch}) for batch in whole) < 8, "a random batch has nearly all lengths"
    assert sorted({*itertools.chain(*first)}) == sorted(itertools.chain(*first)), "a sample is read twice"


def test_loader_processes_read_the_batches_of_the_job() -> None:
    batches = drawn(Bucketed(), 40, 8)
    here = [list(map(int, batch)) for (batch,) in train(Numbers(40), batches=batches, steps=7)]
    assert [list(map(int, b)) for (b,) in train(Numbers(40), batches=batches, steps=7, num_workers=2)] == here


@pytest.mark.parametrize(
    "how",
    [{}, {"weights": torch.rand(100, generator=torch.manual_seed(0))}, {"batches": drawn(Bucketed(), 100, 13)}],
    ids=["permutation", "weights", "batches"],
)
@pytest.mark.parametrize(("dp_size", "accumulation"), LAYOUTS)
def test_a_limited_run_reads_the_first_batches_again_and_again(
    how: dict[str, Any], dp_size: int, accumulation: int
) -> None:
    read = functools.partial(read_by_all_ranks, lambda: Numbers(100), seed=5, global_batch_size=13, **how)
    first = read(data_parallel_size=1, steps=2)
    layout = {"data_parallel_size": dp_size, "grad_accumulation": accumulation}
    assert read(**layout, limit=26, samples_consumed=3 * 13, steps=4) == [first[1], *first, first[0]]
    assert read(**layout, limit=100, steps=9) == read(data_parallel_size=1, steps=9), "no limit"


class Endless:
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@dataclass(frozen=True, kw_only=True)
class Sampled(Toy):
    batches: tuple[tuple[int, ...], ...] | None = None
    weighted: bool = False

    def batch_sampler(self, dataset: Any, batch_size: int, generator: torch.Generator) -> Any:
        return self.batches

    def sample_weights(self, split: Split) -> list[float] | None:
        return [1.0] * 9 if self.weighted else None


@pytest.mark.parametrize(
    ("job", "dataset", "message"),
    [
        (Sampled(batches=()), Numbers(9), "returns no batch"),
        (Sampled(batches=((0, 1, 2), (3, 4))), Numbers(9), r"batch 1 has 2 samples, .*global_batch_size=3.*drop_last"),
        (Sampled(batches=((0, 1, 9),)), Numbers(9), "samples 0 to 9, but the dataset has those from 0 to 8"),
        (Sampled(batches=((0, 1, -1),)), Numbers(9), "samples -1 to 1, but"),
        (Sampled(batches=((0, 1, 2),), weighted=True), Numbers(9), "both choose the samples"),
        (Sampled(batches=((0, 1, 2),)), Streamed(), "a stream is read in its own order"),
    ],
)
def test_batches_that_cannot_be_read_are_refused(job: Job, dataset: Any, message: str) -> None:
    weights = None if is_stream(dataset) else checked_weights(job.sample_weights("train"), dataset)
    with pytest.raises(DatasetError, match=rf"^job\.batch_sampler.*{message}"):
        batches_of(job, Datasets(train=dataset, evaluated={}, weights=weights), 3)


def test_epochs_of_different_lengths_are_refused(golden: Golden) -> None:
    lengths = iter([3, 3, 2])
    epochs = SampleOrder(n=12, seed=0, batches=lambda _: torch.zeros(next(lengths), 4, dtype=torch.int64))
    assert epochs.indices(0, 24) == [0] * 24
    with golden.raises(DatasetError):
        epochs.indices(24, 4)


def test_a_run_continues_with_the_batch_size_of_its_batches(golden: Golden) -> None:
    with golden.raises(DatasetError):
        list(train(Numbers(40), batches=drawn(Bucketed(), 40, 8), samples_consumed=12))


def test_an_epoch_is_as_long_as_its_batches() -> None:
    def samples(job: Job, dataset: Any, limit: int | None = None) -> int | None:
        return samples_per_epoch(job, dataset, having(global_batch_size=13, limit_batches=limit))

    assert samples(Bucketed(), Numbers(100)) == 91
    assert samples(Sampled(), Numbers(100)) == samples(Toy(), Numbers(100)) == 100
    assert samples(Toy(), Streamed()) == 5, "a stream that tells its length"
    assert [samples(Bucketed(), Numbers(100), n) for n in (2, 8)] == [26, 91]
    assert [samples(Toy(), Streamed(), 1), samples(Toy(), Endless(), 2)] == [5, 26]
