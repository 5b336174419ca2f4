"""The order of the samples in every layout, and what a broken dataset does."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from helpers.batch_toys import Ragged, bags
from helpers.batches import LAYOUTS, eval_batches, evaluate, read_by_all_ranks, train, validated
from helpers.cases import Case, having
from helpers.runs import PYTHONPATH
from helpers.toys import Toy
from helpers.training import make, model_of
from orchestrator.job import Job, Split
from orchestrator.model.batch import to_device
from orchestrator.strategies.data.datasets import (
    DatasetError,
    check_dataset,
    epoch_generator,
    is_stream,
    samples_per_epoch,
)
from orchestrator.worker.data.batches import Batches, SampleOrder, checked_weights, epoch_of, permutation
from orchestrator.worker.data.job_data import Datasets, batches_of
from orchestrator.worker.data.length import batches_by_length
from orchestrator.worker.data.loader import DataError


class Numbers(Dataset[int]):
    """Item ``i`` is ``i``."""

    def __init__(self, n: int):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return index


class Broken(Numbers):
    """Item ``bad`` raises ``error``, kills its process ("kill") or never comes ("hang")."""

    def __init__(self, n: int, bad: int, error: Exception | str):
        super().__init__(n)
        self.bad, self.error = bad, error

    def __getitem__(self, index: int) -> int:
        if index != self.bad:
            return index
        if self.error == "kill":
            assert get_worker_info() is not None, "only a loader process may be killed"
            os.kill(os.getpid(), signal.SIGKILL)
        if self.error == "hang":
            time.sleep(60)
        assert isinstance(self.error, Exception)
        raise self.error


class Batched(Broken):
    """The same, whole batches at a time."""

    fetches = 0

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.fetches += 1
        return [super(Batched, self).__getitem__(i) for i in indices]


class TwoPartError(Exception):
    """Cannot be rebuilt from its text alone."""

    def __init__(self, code: int, what: str):
        super().__init__(f"{what} ({code})")


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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_leaves_the_global_generator_alone(num_workers: int) -> None:
    before = torch.get_rng_state()
    list(train(Numbers(20), num_workers=num_workers))
    list(evaluate(Numbers(20), num_workers=num_workers))
    assert torch.get_rng_state().equal(before)


def test_loader_processes_read_the_same() -> None:
    layout = {"data_parallel_size": 2, "dp_rank": 1, "grad_accumulation": 2, "samples_consumed": 24}
    expected = [[b.tolist() for b in step] for step in train(Numbers(20), **layout)]
    read = [[b.tolist() for b in step] for step in train(Numbers(20), num_workers=2, **layout)]
    assert read == expected


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


def test_evaluation_goes_in_order_also_with_loader_processes() -> None:
    rows = [i for batch, valid in evaluate(Numbers(21), num_workers=2) for i in batch[:valid].tolist()]
    assert rows == list(range(21))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Broken, Batched])
@pytest.mark.parametrize("error", [KeyError("pixel"), StopIteration("early"), TwoPartError(7, "torn")], ids=repr)
def test_an_item_that_raises_is_named(kind: type[Broken], error: Exception, num_workers: int) -> None:
    with pytest.raises(DataError) as caught:
        list(train(kind(32, 13, error), num_workers=num_workers))
    assert str(caught.value) == f"train data, sample 13: {type(error).__name__}: {error}"
    cause = caught.value.__cause__
    assert cause is not None
    if num_workers:
        assert "in __getitem__" in str(cause), "the traceback of the loader process"
    else:
        assert type(cause) is type(error)


def test_the_split_is_named() -> None:
    with pytest.raises(DataError, match=r"^val data, sample 5: OSError: gone$"):
        list(evaluate(Broken(9, 5, OSError("gone"))))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_that_raises_is_named(num_workers: int) -> None:
    def collate(items: list[int]) -> Any:
        raise ValueError("ragged")

    with pytest.raises(DataError, match=r"^train data, collating samples \[.*\]: ValueError: ragged$"):
        next(train(Numbers(8), collate=collate, num_workers=num_workers))


def test_a_batched_dataset_is_asked_once_per_batch() -> None:
    dataset = Batched(32, -1, "")
    batches = list(train(dataset, steps=3))
    assert dataset.fetches == 3
    assert [b.tolist() for (b,) in batches] == [b.tolist() for (b,) in train(Numbers(32), steps=3)]


def in_thread(work: Any) -> BaseException | None:
    """What ``work`` raises in a thread of its own: where workers train."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    return raised[0] if raised else None


@pytest.mark.parametrize("threaded", [False, True])
def test_a_killed_loader_process_is_reported_soon(threaded: bool) -> None:
    def read() -> None:
        list(train(Broken(32, 13, "kill"), num_workers=2))

    def read_here() -> BaseException | None:
        with pytest.raises(DataError) as caught:
            read()
        return caught.value

    error = in_thread(read) if threaded else read_here()
    assert isinstance(error, DataError)
    assert "killed by SIGKILL" in str(error)
    assert "data.num_workers" in str(error)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_dataset_that_hangs_is_reported_and_ended() -> None:
    with pytest.raises(DataError, match=r"no batch within 1\.5 s.*data\.num_workers"):
        list(train(Broken(32, 13, "hang"), num_workers=2, timeout_s=1.5))
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_batch_may_take_longer_than_a_turn_of_waiting() -> None:
    def slow(items: list[int]) -> list[int]:
        time.sleep(1.5)
        return items

    assert len(list(train(Numbers(8), collate=slow, num_workers=1, steps=2))) == 2


def test_loader_processes_live_from_the_first_batch_to_close() -> None:
    batches = train(Numbers(64), num_workers=2, steps=100)
    assert not multiprocessing.active_children()
    with closing(batches):
        next(batches)
        assert len(multiprocessing.active_children()) == 2
    assert not multiprocessing.active_children()


def test_loader_processes_stay_from_one_evaluation_to_the_next() -> None:
    def rows() -> list[int]:
        return [i for batch, valid in batches for i in batch[:valid].tolist()]

    with closing(eval_batches(Numbers(21), num_workers=2)) as batches:
        assert rows() == list(range(21))
        processes = {p.pid for p in multiprocessing.active_children()}
        assert rows() == list(range(21))
        assert {p.pid for p in multiprocessing.active_children()} == processes
        assert len(processes) == 2
        os.kill(min(processes), signal.SIGKILL)
        assert rows() == list(range(21)), "an idle process that has died is replaced"
    assert not multiprocessing.active_children()


def test_an_evaluation_that_is_broken_off_leaves_no_loader_processes() -> None:
    batches = eval_batches(Numbers(64), num_workers=2)
    with closing(iter(batches)) as first:
        next(first)
        assert multiprocessing.active_children()
    assert not multiprocessing.active_children()
    assert sum(valid for _, valid in batches) == 64
    batches.close()


@pytest.mark.slow
def test_loader_processes_die_with_their_worker_and_not_by_ctrl_c() -> None:
    code = """
        import multiprocessing, time
        from torch.utils.data._utils import worker as torch_worker
        torch_worker.MP_STATUS_CHECK_INTERVAL = 90  # torch's own watch would end the loader process after 5 s
        from test_data import Numbers, train
        batches = train(Numbers(64), num_workers=1, steps=100)
        next(batches)
        print(multiprocessing.active_children()[0].pid, flush=True)
        time.sleep(60)
    """
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=os.path.dirname(__file__),  # noqa: PTH120
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
    )
    assert worker.stdout is not None
    try:
        loader = psutil.Process(int(worker.stdout.readline()))
        loader.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert loader.status() != psutil.STATUS_ZOMBIE
    finally:
        worker.kill()
        worker.wait(timeout=10)
        worker.stdout.close()
    deadline = time.monotonic() + 60
    while loader.is_running() and loader.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the loader process outlived its worker"
        time.sleep(0.02)


class Streamed(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def __len__(self) -> int:
        return 5


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
        assert checked is not None
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


@dataclass(frozen=True, kw_only=True)
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
        read_by_all_ranks,
        lambda: Numbers(100),
        seed=5,
        global_batch_size=13,
        batches=drawn(Bucketed(), 100, 13),
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


def test_epochs_of_different_lengths_are_refused() -> None:
    lengths = iter([3, 3, 2])
    epochs = SampleOrder(n=12, seed=0, batches=lambda _: torch.zeros(next(lengths), 4, dtype=torch.int64))
    assert epochs.indices(0, 24) == [0] * 24
    with pytest.raises(DatasetError, match=r"epoch 2 has 8 samples, and the first had 12"):
        epochs.indices(24, 4)


def test_a_run_continues_with_the_batch_size_of_its_batches() -> None:
    with pytest.raises(DatasetError, match=r"global_batch_size=8: the run has read 12 samples"):
        list(train(Numbers(40), batches=drawn(Bucketed(), 40, 8), samples_consumed=12))


def test_an_epoch_is_as_long_as_its_batches() -> None:
    assert samples_per_epoch(Bucketed(), Numbers(100), 13) == 91
    assert samples_per_epoch(Sampled(), Numbers(100), 13) == samples_per_epoch(Toy(), Numbers(100), 13) == 100
    assert samples_per_epoch(Toy(), Streamed(), 13) == 5, "a stream that tells its length"
