"""What a dataset draws at random depends on the position in the run alone, not on processes or on the past."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, default_collate

from helpers.jobs.toys import Toy
from helpers.ranks.batches import Numbers, evaluate, train
from orchestrator.job import Split
from orchestrator.strategies.data.datasets import drawn_batches, epoch_generator
from orchestrator.worker.data.opened import datasets_of
from orchestrator.worker.data.stream import StreamReader

DRAW: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),
    "python": random.random,
}
LAYOUT = {"data_parallel_size": 2, "dp_rank": 1, "grad_accumulation": 2}


class Noisy(Numbers):
    def __init__(self, kind: str):
        super().__init__(20)
        self.kind = kind

    def __getitem__(self, index: int) -> Any:
        return DRAW[self.kind]()


class NoisyAtOnce(Noisy):
    def __getitems__(self, indices: list[int]) -> list[float]:
        return [DRAW[self.kind]() for _ in indices]


class NoisyStream(IterableDataset[float]):
    """Shuffles at the beginning of an epoch and draws for each sample; an epoch ends within a batch."""

    def __init__(self, kind: str):
        self.kind = kind

    def __iter__(self) -> Iterator[float]:
        offset = DRAW[self.kind]()
        for _ in range(37):
            yield offset + DRAW[self.kind]()


class NoisyEpochs(NoisyStream):
    def set_epoch(self, epoch: int) -> None:
        pass


@dataclass(frozen=True)
class NoisyCollate:
    kind: str

    def __call__(self, items: list[Any]) -> Any:
        return default_collate([item + DRAW[self.kind]() for item in items])


def flat(steps: Any) -> list[list[float]]:
    return [[x for batch in step for x in batch.tolist()] for step in steps]


def made(what: str, kind: str) -> dict[str, Any]:
    if what == "collate":
        return {"dataset": Numbers(20), "collate": NoisyCollate(kind)}
    kinds = {"items": Noisy, "batches": NoisyAtOnce, "stream": NoisyStream}
    return {"dataset": kinds[what](kind)}


@pytest.fixture(autouse=True)
def _draws_something_else_first() -> None:
    for draw in DRAW.values():
        draw()


@pytest.mark.in_turn
@pytest.mark.parametrize("what", ["items", "batches", "collate", "stream"])
@pytest.mark.parametrize("kind", DRAW)
def test_a_resumed_run_draws_the_same_with_any_number_of_loader_processes(what: str, kind: str) -> None:
    whole = flat(train(**made(what, kind), **LAYOUT, steps=8))
    assert len({x for step in whole for x in step}) == 8 * 4, "each sample draws anew, in each epoch"
    for num_workers in (0, 1, 2):
        after = train(**made(what, kind), **LAYOUT, steps=3, samples_consumed=5 * 8, num_workers=num_workers)
        assert flat(after) == whole[5:]


@pytest.mark.parametrize("kind", DRAW)
def test_ranks_and_seeds_draw_different_numbers(kind: str) -> None:
    seen = [
        flat(train(Noisy(kind), data_parallel_size=2, dp_rank=rank, seed=seed)) for rank in (0, 1) for seed in (0, 1)
    ]
    assert len({x for run in seen for step in run for x in step}) == 4 * 4 * 4


@pytest.mark.in_turn
@pytest.mark.parametrize("what", ["items", "batches", "collate", "stream"])
@pytest.mark.parametrize("kind", DRAW)
def test_each_evaluation_draws_the_same(what: str, kind: str) -> None:
    words: dict[str, Any] = {**made(what, kind), "data_parallel_size": 2, "dp_rank": 1}
    first, *others = (
        [batch.tolist() for batch, _ in evaluate(**words, num_workers=num_workers)] for num_workers in (0, 0, 2)
    )
    assert others == [first, first]
    assert [batch.tolist() for batch, _ in evaluate(**words, seed=1)] != first


@pytest.mark.in_turn
@pytest.mark.parametrize("what", ["items", "batches", "collate", "stream"])
@pytest.mark.parametrize("kind", DRAW)
def test_reading_leaves_the_generators_of_the_training_thread_alone(what: str, kind: str) -> None:
    states = [random.getstate(), torch.get_rng_state().tolist(), repr(np.random.get_state(legacy=False))]
    list(train(**made(what, kind)))
    list(evaluate(**made(what, kind)))
    assert states == [random.getstate(), torch.get_rng_state().tolist(), repr(np.random.get_state(legacy=False))]


@pytest.mark.parametrize("kind", DRAW)
def test_a_stream_that_goes_back_draws_the_same(kind: str) -> None:
    """From the beginning of an epoch, which is within a batch, and in the calls in which it was read."""
    reader = StreamReader(NoisyEpochs(kind), recent=20, batch_size=8)
    whole = [reader.read(8, first=0, end=8) for _ in range(12)]
    count = reader.go_to_mark(9 * 8)
    assert count == 72 - 37
    for skipped in (3, *[8] * 4):
        reader.skip(skipped)
    assert [reader.read(8, first=0, end=8) for _ in range(3)] == whole[9:]


@dataclass(frozen=True, kw_only=True)
class Splitting(Toy):
    """Divides its data, weighs it and draws its batches from the global generators, as scripts do."""

    kind: str

    def dataset(self, split: Split) -> Any:
        order = sorted(range(20), key=lambda _: DRAW[self.kind]())
        return order[:15] if split == "train" else order[15:]

    def sample_weights(self, split: Split) -> list[float]:
        return [DRAW[self.kind]() for _ in range(15)]


@pytest.mark.parametrize("kind", DRAW)
def test_every_process_divides_and_weighs_the_data_alike(kind: str) -> None:
    first, second = (datasets_of(Splitting(kind=kind), ["val"], 3) for _ in range(2))
    assert first.train == second.train
    assert sorted(first.train + first.evaluated["val"]) == list(range(20))
    assert second.weights is not None
    assert first.weights.equal(second.weights)


class Sampling(Splitting):
    def batch_sampler(self, dataset: Any, batch_size: int, generator: torch.Generator) -> Any:
        return BatchSampler(RandomSampler(dataset), batch_size, drop_last=True)


def test_a_sampler_with_a_generator_of_its_own_draws_the_same_in_every_process() -> None:
    job = Sampling(kind="torch")
    epochs = [drawn_batches(job, list(range(15)), 5, epoch_generator(0, epoch)) for epoch in (0, 0, 1)]
    assert torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[0], epochs[2])
