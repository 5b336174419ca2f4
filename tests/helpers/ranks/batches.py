"""The batches that the training loop reads, with defaults for what a test does not care about."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import fields, replace
from typing import Any, TypeVar

from torch.utils.data import Dataset, IterableDataset

from helpers.ranks.gang import own_device
from orchestrator.config.redact import Redactor
from orchestrator.protocol.messages import EvalPoint
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.data.datasets import is_stream
from orchestrator.worker.control.control import Outbox
from orchestrator.worker.data.batches import EvalBatches, Sampling, Share, train_batches
from orchestrator.worker.data.data_loader import Loading
from orchestrator.worker.data.stream import StreamReader
from orchestrator.worker.reports import evaluation

LAYOUTS = [(1, 1), (2, 1), (1, 3), (3, 2), (4, 1), (5, 2)]
"""``data_parallel_size`` and ``grad_accumulation``."""

HERE = Loading(collate=None, num_workers=0, pin_memory=False, timeout_s=30.0)
"""In this thread."""
ALONE = Share(global_batch_size=8, data_parallel_size=1, dp_rank=0, grad_accumulation=1)
"""Of the only rank."""
T = TypeVar("T", Loading, Share, Sampling)


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


class Streamed(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def __len__(self) -> int:
        return 5


def train(dataset: Any, **changes: Any) -> Any:
    sampling, share, loading = (_changed(part, changes) for part in (Sampling(seed=0), ALONE, HERE))
    words = {"samples_consumed": 0, "steps": 4, **changes}
    return train_batches(opened(dataset, words["samples_consumed"]), sampling, share, loading, **words)


def _changed(part: T, changes: dict[str, Any]) -> T:
    """``part`` with the ``changes`` of its fields, which are taken out of these."""
    return replace(part, **{f.name: changes.pop(f.name) for f in fields(part) if f.name in changes})


def opened(dataset: Any, samples_consumed: int) -> Any:
    """The dataset, or the reader of a stream at this position."""
    if not is_stream(dataset):
        return dataset
    reader = StreamReader(dataset)
    reader.skip(samples_consumed)
    return reader


def eval_batches(dataset: Any, **changes: Any) -> EvalBatches:
    loading = _changed(HERE, changes)
    return EvalBatches(dataset, loading, **{"data_parallel_size": 1, "dp_rank": 0, "batch_size": 8, **changes})


def evaluate(dataset: Any, **changes: Any) -> Any:
    with closing(eval_batches(dataset, **changes)) as batches:
        yield from batches


def read_by_all_ranks(make: Callable[[], Any], *, data_parallel_size: int, **changes: Any) -> list[list[int]]:
    """The samples of each step, the micro-batches of all ranks one after the other."""
    ranks = [
        list(train(make(), data_parallel_size=data_parallel_size, dp_rank=rank, **changes))
        for rank in range(data_parallel_size)
    ]
    return [
        [int(i) for micro_batches in step for batch in micro_batches for i in batch]
        for step in zip(*ranks, strict=True)
    ]


def validated(strategy: Strategy, rank: int, dataset: Any, *, step: int = 0) -> EvalPoint:
    """Evaluate on this rank as the training loop does."""
    mesh = strategy.context.mesh
    with strategy.quiesced():
        batches = evaluate(
            dataset,
            collate=strategy.job.collate,
            batch_size=strategy.eval_batch_size,
            data_parallel_size=mesh.data_parallel_size,
            dp_rank=mesh.dp_rank(rank),
            timeout_s=10,
            read=strategy.traits.reads_data,
        )
        return evaluation.evaluate(strategy, batches, step=step, device=own_device(), outbox=Outbox(Redactor()))
