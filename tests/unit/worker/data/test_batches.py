"""The order of the samples in every layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from helpers.conformance.cases import Case, having
from helpers.conformance.training import make, model_of
from helpers.jobs.batch_toys import Ragged, bags
from helpers.ranks.batches import LAYOUTS, Numbers, eval_batches, evaluate, read_by_all_ranks, train, validated
from orchestrator.model.batch import to_device
from orchestrator.strategies.data.datasets import (
    check_dataset,
)
from orchestrator.worker.data.batches import SampleOrder, epoch_of, permutation


@pytest.mark.parametrize(("dp_size", "accumulation"), LAYOUTS)
@pytest.mark.parametrize(("n", "batch"), [(100, 10), (37, 13), (7, 32), (64, 65)])
def test_all_ranks_together_read_the_stream(n: int, batch: int, dp_size: int, accumulation: int) -> None:
    epochs = [permutation(n, seed=3, epoch=e).tolist() for e in range(40)]
    stream = [i for epoch in epochs for i in epoch]
    steps = read_by_all_ranks(
        lambda: Numbers(n),
        data_parallel_size=dp_size,
        grad_accumulation=accumulation,
        global_batch_size=batch,
        seed=3,
        steps=8,
    )
    assert steps == [stream[k * batch : (k + 1) * batch] for k in range(8)]


@pytest.mark.parametrize(("dp_size", "accumulation"), LAYOUTS)
@pytest.mark.parametrize("done", [1, 3, 7])
def test_any_layout_resumes_at_the_next_sample(done: int, dp_size: int, accumulation: int) -> None:
    whole = read_by_all_ranks(lambda: Numbers(37), data_parallel_size=2, global_batch_size=13, steps=10)
    rest = read_by_all_ranks(
        lambda: Numbers(37),
        data_parallel_size=dp_size,
        grad_accumulation=accumulation,
        global_batch_size=13,
        samples_consumed=done * 13,
        steps=10 - done,
    )
    assert rest == whole[done:]


def test_a_changed_batch_size_resumes_at_the_next_sample() -> None:
    order = SampleOrder(n=37, seed=0)
    steps = read_by_all_ranks(
        lambda: Numbers(37), data_parallel_size=2, global_batch_size=20, samples_consumed=39, steps=2
    )
    assert steps == [order.indices(39, 20), order.indices(59, 20)]


def test_micro_batches_are_even() -> None:
    sizes = [[len(b) for b in step] for step in train(Numbers(99), global_batch_size=11, grad_accumulation=3)]
    assert sizes == [[4, 4, 3]] * 4


def test_an_epoch_has_every_sample_once() -> None:
    order = SampleOrder(n=50, seed=1)
    for epoch in range(3):
        assert sorted(order.indices(epoch * 50, 50)) == list(range(50))


def test_the_order_depends_on_seed_and_epoch() -> None:
    pairs = [(s, e) for s in range(8) for e in range(8)]
    orders = {tuple(permutation(50, seed=s, epoch=e).tolist()) for s, e in pairs}
    assert len(orders) == len(pairs)
    assert permutation(50, seed=1, epoch=2).equal(permutation(50, seed=1, epoch=2))


class WholeBatches(Numbers):
    """The same, read and joined at once."""

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices)


def as_it_is(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("dp_size", [1, 2, 3, 7])
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("n", [1, 2, 5, 16, 33])
@pytest.mark.parametrize(("dataset", "reading"), [(Numbers, {}), (WholeBatches, {"collate": as_it_is})])
def test_evaluation_counts_each_sample_once(
    n: int, batch: int, dp_size: int, dataset: type[Numbers], reading: dict[str, Any]
) -> None:
    counted: Counter[int] = Counter()
    numbers_of_batches = set()
    for rank in range(dp_size):
        share = {"batch_size": batch, "data_parallel_size": dp_size, "dp_rank": rank}
        batches = list(evaluate(dataset(n), **share, **reading))
        numbers_of_batches.add(len(batches))
        for rows, valid in batches:
            assert len(rows) == batch
            counted.update(rows[:valid].tolist())
    assert counted == Counter(range(n))
    assert len(numbers_of_batches) == 1


class Listed(IterableDataset[Any]):
    """The items of a list, one after the other."""

    def __init__(self, items: list[Any]):
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


@pytest.mark.parametrize("kind", [list, Listed])
def test_batches_without_a_row_for_each_sample_are_not_padded(kind: Callable[[list[Any]], Any]) -> None:
    dataset = kind([(torch.arange(1 + i % 3), i) for i in range(11)])
    for pad_ragged, rows in ((False, 3), (True, 8)):
        batches = list(evaluate(dataset, collate=bags, pad_ragged=pad_ragged))
        assert [(len(targets), valid) for (_, targets), valid in batches] == [(8, 8), (rows, 3)]
    (tokens, offsets), targets = list(evaluate(dataset, collate=bags))[1][0]
    assert (tokens.tolist(), offsets.tolist(), targets.tolist()) == ([0, 1, 2, 0, 0, 1], [0, 3, 4], [8, 9, 10])


def test_batches_without_a_row_for_each_sample_are_evaluated_exactly() -> None:
    job = Ragged(samples=21)
    strategy = make(Case(job=job, train=having(global_batch_size=8)), 0)
    point = validated(strategy, 0, job.dataset("val"))
    inputs, target = bags([*job.dataset("val")])
    loss = job.loss(model_of(strategy)(inputs), target)
    assert (point.loss_sum / point.weight, point.weight) == (pytest.approx(float(loss), rel=1e-6), 21)


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("dataset", [Numbers(0), Unsized()], ids=lambda d: type(d).__name__)
def test_an_unusable_dataset_is_refused_at_once(dataset: Any) -> None:
    with pytest.raises(ValueError, match=r"job\.dataset\('train'\)"):
        check_dataset(dataset, split="train")
    with pytest.raises(ValueError, match=r"job\.dataset\('val'\)"):
        eval_batches(dataset)


def test_to_device_keeps_the_shape_of_a_batch() -> None:
    tensor = torch.ones(2)
    batch = (tensor, {"a": [tensor, "text"], "b": torch.Size([3])})
    assert to_device(batch, torch.device("cpu")) is batch
    moved, rest = to_device(batch, torch.device("meta"))
    assert moved.device.type == rest["a"][0].device.type == "meta"
    assert rest["a"][1] == "text"
    assert rest["b"] == torch.Size([3])


def test_epoch_of() -> None:
    assert epoch_of(0, 50) == 0
    assert epoch_of(75, 50) == 1.5
    assert epoch_of(75, None) is None
