"""The order of the samples in every layout."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from helpers.conformance.cases import Case, having
from helpers.conformance.training import make, model_of
from helpers.jobs.batch_toys import Ragged, bags
from helpers.ranks.batches import (
    LAYOUTS,
    Numbers,
    Streamed,
    eval_batches,
    evaluate,
    read_by_all_ranks,
    train,
    validated,
)
from orchestrator.model.batch import to_device
from orchestrator.strategies.data.datasets import check_dataset
from orchestrator.worker.data.batches import SampleOrder, checked_weights, epoch_of, permutation


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


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_evaluation_is_limited_to_some_samples(dp_size: int, streamed: bool) -> None:
    for kept in (range(10), range(1), range(99) if streamed else [7, 3, 30, 5]):
        dataset = Listed(list(range(37))) if streamed else Numbers(37)
        counted: Counter[int] = Counter()
        for rank in range(dp_size):
            for rows, valid in evaluate(dataset, kept=kept, batch_size=4, data_parallel_size=dp_size, dp_rank=rank):
                counted.update(rows[:valid].tolist())
        assert counted == Counter(i for i in kept if i < 37)


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


# Samples that are drawn by their weights ----------------------------------------------------------


WEIGHTS = torch.tensor([5.0, 1.0, 0.0, 1.0] * 25, dtype=torch.float64)


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    order = SampleOrder(n=100, seed=1, weights=WEIGHTS)
    drawn = Counter(i % 4 for i in order.indices(0, 70_000))
    assert drawn[2] == 0
    assert drawn[0] / 70_000 == pytest.approx(5 / 7, abs=0.01)
    assert drawn[1] / drawn[3] == pytest.approx(1, abs=0.1)
    assert order.indices(70_000, 100) != order.indices(70_100, 100), "each epoch is drawn anew"
    assert order.indices(70_000, 100) != SampleOrder(n=100, seed=2, weights=WEIGHTS).indices(70_000, 100)


def test_the_last_weights_may_be_zero() -> None:
    weights = torch.tensor([0.0, 3.0, 0.0, 0.0], dtype=torch.float64)
    assert SampleOrder(n=4, seed=0, weights=weights).indices(0, 40) == [1] * 40


def test_samples_of_weight_0_are_not_drawn_at_the_ends_either(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([0.0, 1.0, 0.5, 0.0], dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: ends)
    weights = torch.tensor([0.0, 3.0, 0.0, 0.0], dtype=torch.float64)
    assert SampleOrder(n=4, seed=0, weights=weights).indices(0, 4) == [1] * 4


@pytest.mark.parametrize(("dp_size", "accumulation"), LAYOUTS)
def test_any_layout_draws_the_same_and_resumes_at_the_next_sample(dp_size: int, accumulation: int) -> None:
    whole = SampleOrder(n=100, seed=0, weights=WEIGHTS).indices(0, 39 * 6)
    rest = read_by_all_ranks(
        lambda: Numbers(100),
        data_parallel_size=dp_size,
        grad_accumulation=accumulation,
        global_batch_size=39,
        samples_consumed=39 * 2,
        steps=4,
        weights=WEIGHTS,
    )
    assert [i for step in rest for i in step] == whole[39 * 2 :]


def test_weights_of_many_kinds_are_accepted() -> None:
    for weights in ([1, 0, 2], torch.tensor([1, 0, 2]), torch.tensor([1.0, 0.0, 2.0]).numpy()):
        checked = checked_weights(weights, Numbers(3))
        assert checked.tolist() == [1, 0, 2]
    assert checked_weights(None, Numbers(3)) is None


@pytest.mark.parametrize(
    ("weights", "dataset", "message"),
    [
        ([1.0, 2.0], Numbers(3), r"shape \(2,\), but the dataset has 3 samples"),
        ([1.0, -2.0, 1.0], Numbers(3), "weights must be finite and at least 0"),
        ([1.0, float("nan"), 1.0], Numbers(3), "weights must be finite and at least 0"),
        ([0.0, 0.0, 0.0], Numbers(3), "weights must be .* one of them greater than 0"),
        ([1.0] * 5, Streamed(), "the samples of a stream cannot be drawn by weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: Any, dataset: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^job\.sample_weights\('train'\): {message}"):
        checked_weights(weights, dataset)
