"""Streams: every layout reads the same global batches, and a run continues at the next sample."""

import copy
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.data
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from helpers.files.golden import Golden
from helpers.jobs.toys import Rows
from helpers.ranks import batches
from helpers.ranks.batches import LAYOUTS
from helpers.ranks.streams import KINDS, Counting, Epochs, Plain, Stateful
from orchestrator.compat.streams import divides_by_rank
from orchestrator.strategies.data.datasets import check_dataset, first_item, is_stream, known_length
from orchestrator.worker.data.data_loader import DataError
from orchestrator.worker.data.stream import MAX_STATE_BYTES, Mark, StreamReader, digest

STREAMED: dict[str, Any] = {"collate": list, "steps": 6, "global_batch_size": 13}


def train(dataset: Any, **changes: Any) -> Any:
    return batches.train(dataset, **{**STREAMED, **changes})


def evaluate(dataset: Any, **changes: Any) -> Any:
    return batches.evaluate(dataset, **{"collate": list, **changes})


def read_by_all_ranks(kind: type[Plain], n: int, **changes: Any) -> list[list[int]]:
    return batches.read_by_all_ranks(lambda: kind(range(n)), **{**STREAMED, **changes})


class AtRandom(Plain):
    """Shuffled by torch's own generator."""

    def order(self) -> list[int]:
        return torch.randperm(len(self.items)).tolist()


def order_of(kind: type[Plain], n: int, *, epochs: int) -> list[int]:
    """What iterating over a new object again and again yields."""
    dataset = kind(range(n))
    order: list[int] = []
    for epoch in range(epochs):
        if isinstance(dataset, Epochs):
            dataset.set_epoch(epoch)
        order += dataset
    return order


@pytest.mark.slow
@pytest.mark.in_turn
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Plain, Epochs, Counting, Stateful])
def test_all_ranks_together_read_the_stream(kind: type[Plain], num_workers: int) -> None:
    for n, (dp_size, accumulation) in itertools.product([5, 37, 64], LAYOUTS if num_workers == 0 else [(3, 2)]):
        order = order_of(kind, n, epochs=16)
        steps = read_by_all_ranks(
            kind, n, data_parallel_size=dp_size, grad_accumulation=accumulation, num_workers=num_workers
        )
        assert steps == [order[k * 13 : (k + 1) * 13] for k in range(6)]


@pytest.mark.parametrize("kind", [Plain, Epochs, Counting, Stateful])
def test_a_position_is_the_same_in_any_layout(kind: type[Plain]) -> None:
    whole = read_by_all_ranks(kind, 37, data_parallel_size=2)
    for dp_size, accumulation in LAYOUTS:
        rest = read_by_all_ranks(
            kind, 37, data_parallel_size=dp_size, grad_accumulation=accumulation, samples_consumed=3 * 13, steps=3
        )
        assert rest == whole[3:]


@pytest.mark.parametrize(("kind", "n"), [(Plain, 9), (Plain, 64), (Epochs, 64), (Stateful, 64), (AtRandom, 64)])
def test_a_limited_stream_is_its_first_samples_again_and_again(kind: type[Plain], n: int) -> None:
    whole = StreamReader(kind(range(n)), seed=3, batch_size=4, limit=12)
    first = whole.read(12, first=0, end=12)
    if n > 12:
        assert first == StreamReader(kind(range(n)), seed=3, batch_size=4).read(12, first=0, end=12)
    order = first[: min(n, 12)] * 9
    assert [whole.read(4, first=1, end=3) for _ in range(5)] == [order[12 + 4 * k :][1:3] for k in range(5)]
    again = StreamReader(kind(range(n)), seed=3, batch_size=4, limit=12)
    if mark := whole.bookmark(32):
        again.add_bookmark(Mark.from_json(json.loads(json.dumps(mark.to_json()))))
    go_to(again, 32)
    assert read(again) == order[32:42]


def read(reader: StreamReader, count: int = 10) -> list[int]:
    return reader.read(count, first=0, end=count)


def go_to(reader: StreamReader, position: int) -> int:
    """Go to ``position``; returns how many samples had to be read again."""
    assert reader.reaches(position)
    count = reader.go_to_mark(position)
    reader.skip(count)
    assert reader.position == position
    return count


@pytest.mark.parametrize("done", [0, 10, 30, 37, 40, 74, 90])
def test_a_state_leads_to_the_next_sample(done: int) -> None:
    first = StreamReader(Stateful(range(37)))
    for _ in range(done // 10):
        read(first)
    if done % 10:
        read(first, done % 10)
    mark = first.bookmark(done)
    assert (mark is None) == (done == 0)
    second = StreamReader(Stateful(range(37)))
    if mark is not None:
        text = json.dumps(mark.to_json())
        second.add_bookmark(Mark.from_json(json.loads(text)))
    assert go_to(second, done) == 0
    order = order_of(Stateful, 37, epochs=6)
    assert [read(second), read(second), read(second, 60)] == [
        order[done : done + 10],
        order[done + 10 : done + 20],
        order[done + 20 : done + 80],
    ]


@pytest.mark.parametrize("kind", ["plain", "read ahead", "mixed"])
def test_nodes_of_torchdata_continue_at_the_next_sample(kind: str) -> None:
    nodes = pytest.importorskip("torchdata.nodes", reason="the optional package is missing: pip install torchdata")

    def make() -> Any:
        numbers = nodes.IterableWrapper(range(37))
        if kind == "read ahead":
            numbers = nodes.Prefetcher(nodes.ParallelMapper(numbers, lambda n: -n, num_workers=2, method="thread"), 4)
        if kind == "mixed":  # its state has tensors, which a checkpoint does not keep
            others = nodes.IterableWrapper(range(100, 120))
            numbers = nodes.MultiNodeWeightedSampler({"a": numbers, "b": others}, {"a": 0.5, "b": 0.5}, seed=3)
        return nodes.Loader(numbers)

    check_dataset(make(), split="train")
    whole = StreamReader(make())
    order = [n for _ in range(12) for n in read(whole)]
    for done in (10, 40, 70):
        first, second = StreamReader(make()), StreamReader(make())
        for _ in range(done // 10):
            read(first)
        mark = first.bookmark(done)
        values = mark.to_json()
        assert (values is None) == (kind == "mixed")
        if values is not None:
            second.add_bookmark(Mark.from_json(json.loads(json.dumps(values))))
        assert go_to(second, done) == (done if kind == "mixed" else 0)
        assert read(second, 40) == order[done : done + 40]


def test_epochs_that_can_be_set_are_not_read_again() -> None:
    first = StreamReader(Epochs(range(37)))
    read(first, 90)
    mark = first.bookmark(90)
    assert mark == Mark(position=74, epoch=2)
    second = StreamReader(Epochs(range(37)))
    second.add_bookmark(mark)
    assert go_to(second, 90) == 16
    assert read(second, 40) == order_of(Epochs, 37, epochs=4)[90:130]


@pytest.mark.parametrize("kind", [Plain, Counting])
def test_other_streams_are_read_again_from_a_new_object(kind: type[Plain]) -> None:
    reader = StreamReader(kind(range(37)))
    read(reader, 50)
    assert reader.bookmark(50) == Mark(seen=[0, digest(order_of(kind, 37, epochs=1)[:1])])
    assert not reader.reaches(49)
    reader.add_bookmark(Mark(position=37, epoch=1))  # of a version of the job that had set_epoch()
    assert not reader.reaches(49)
    new = StreamReader(kind(range(37)))
    assert go_to(new, 49) == 49
    assert read(new, 30) == order_of(kind, 37, epochs=3)[49:79]


class Reversed(Plain):
    """Has another order in each object."""

    objects = itertools.count()

    def __init__(self, items: Any):
        super().__init__(list(items)[:: (-1) ** next(self.objects)])


@pytest.mark.parametrize("kind", [Plain, Counting, Epochs, Stateful, Reversed])
def test_a_stream_that_is_read_again_is_compared_with_a_sample_of_before(kind: type[Plain]) -> None:
    first = StreamReader(kind(range(64)), batch_size=8)
    for _ in range(11):
        read(first, 8)
    mark = first.bookmark(80)
    assert mark is not None
    told: list[str] = []
    again = StreamReader(kind(range(64)), batch_size=8, warn=told.append)
    again.add_bookmark(Mark.from_json(json.loads(json.dumps(mark.to_json()))))
    go_to(again, 80)
    for _ in range(9):
        read(again, 8)
    assert ["sample 72 is not what it was before" in text for text in told] == [True] * (kind is Reversed)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([{"x": torch.tensor([1.0]), "y": 1}], [{"x": torch.tensor([1.0]), "y": 2}]),
        ([{"x": torch.tensor([1.0], dtype=torch.bfloat16)}], [{"x": torch.tensor([2.0], dtype=torch.bfloat16)}]),
        ([{"x": np.arange(3)}], [{"x": np.arange(3)[::-1]}]),
        ([("a", b"b")], [("a", b"c")]),
        ([{"tokens": [1, 2, 3]}], [{"tokens": [1, 2, 4]}]),
        ([Mark(position=1)], [Mark(position=2)]),
        ([{"x": np.array(["a", None], dtype=object)}], [{"x": np.array(["b", None], dtype=object)}]),
    ],
)
def test_samples_of_other_values_have_another_digest(one: Any, other: Any) -> None:
    assert digest(one) == digest(copy.deepcopy(one)) != digest(other)


def test_a_survivor_goes_back_by_some_steps() -> None:
    stream = Stateful(range(370))
    reader = StreamReader(stream, recent=3)
    batches = [read(reader) for _ in range(7)]
    before = stream.yielded
    assert go_to(reader, 60) == 0
    assert read(reader) == batches[6]
    assert stream.yielded == before + 10
    reader.bookmark(70)
    for _ in range(9):
        read(reader)
    assert go_to(reader, 75) == 5, "from the bookmark"
    assert go_to(reader, 45) == 45, "from the beginning of the epoch"


def test_samples_read_ahead_are_not_in_the_state() -> None:
    reader = StreamReader(Stateful(range(37)), recent=8)
    batches = train(reader, num_workers=2, global_batch_size=5)
    next(batches)
    next(batches)
    assert reader.position > 10
    mark = reader.bookmark(10)
    batches.close()
    assert mark.position == 10
    assert go_to(reader, 10) == 0
    assert read(reader, 5) == order_of(Stateful, 37, epochs=1)[10:15]


@pytest.mark.parametrize("state", [{"random": torch.zeros(2)}, {3: "text"}, (1, 2), "x" * MAX_STATE_BYTES, {1, 2}])
def test_a_state_that_json_would_change_is_not_kept(state: Any) -> None:
    assert Mark(position=3, epoch=0, state=state).to_json() is None


class Failing(Plain):
    """Sample ``bad`` raises, at the first attempt only."""

    failed = False

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            if item == 23 and not self.failed:
                self.failed = True
                raise OSError("shard 3 is torn")
            yield item


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_that_raises_is_named(num_workers: int, golden: Golden) -> None:
    batches = train(Failing(range(37)), num_workers=num_workers, global_batch_size=8)
    next(batches)
    next(batches)
    with golden.raises(DataError):
        next(batches)


def test_a_stream_that_has_failed_does_not_look_as_if_it_had_ended() -> None:
    reader = StreamReader(Failing(range(37)))
    with pytest.raises(DataError):
        read(reader, 30)
    assert not reader.reaches(30)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_that_raises_is_named(num_workers: int, golden: Golden) -> None:
    def collate(items: list[int]) -> Any:
        raise ValueError("ragged")

    with golden.raises(DataError):
        next(train(Plain(range(37)), collate=collate, num_workers=num_workers, global_batch_size=8,
                   data_parallel_size=2, dp_rank=1))  # fmt: skip


class Once(IterableDataset[int]):
    def __init__(self) -> None:
        self.samples = iter(range(20))

    def __iter__(self) -> Iterator[int]:
        return self.samples


@pytest.mark.parametrize("dataset", [Plain([]), Once()], ids=["empty", "once"])
def test_a_stream_without_samples_is_an_error(dataset: Any, golden: Golden) -> None:
    with golden.raises(DataError):
        list(train(dataset))


def test_dict_items_without_pairs() -> None:
    items = [{"input_ids": torch.tensor([i, i]), "labels": torch.tensor([i])} for i in range(16)]
    for dataset in (Rows(items), Plain(items)):
        [[batch]] = train(dataset, collate=None, steps=1, global_batch_size=4)
        assert {k: tuple(v.shape) for k, v in batch.items()} == {"input_ids": (4, 2), "labels": (4, 1)}
        batch, valid = next(evaluate(dataset, collate=None))
        assert batch["labels"].tolist() == [[i] for i in range(8)]
        assert valid == 8


@pytest.mark.parametrize("num_workers", [0, 2])
def test_evaluation_counts_each_sample_of_a_stream_once(num_workers: int) -> None:
    cases = itertools.product([1, 2, 5, 16, 33], [1, 4, 16], [1, 2, 3, 7]) if num_workers == 0 else [(33, 4, 2)]
    for n, batch_size, dp_size in cases:
        counted: Counter[int] = Counter()
        numbers_of_batches = set()
        for rank in range(dp_size):
            layout = {"batch_size": batch_size, "data_parallel_size": dp_size, "dp_rank": rank}
            batches = list(evaluate(Plain(range(n)), num_workers=num_workers, **layout))
            valid_only = [valid for _, valid in evaluate(Plain(range(n)), read=False, **layout)]
            assert valid_only == [valid for _, valid in batches]
            numbers_of_batches.add(len(batches))
            for rows, valid in batches:
                assert len(rows) == batch_size
                counted.update(rows[:valid])
        assert counted == Counter(range(n))
        assert len(numbers_of_batches) == 1


def test_errors_of_an_evaluation_on_a_stream(golden: Golden) -> None:
    with golden.raises(DataError):
        list(evaluate(Failing(range(37))))
    with golden.raises(DataError):
        list(evaluate(Plain([])))


class IterOnly(Dataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Chunks:
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Sized(Plain):
    def __len__(self) -> int:
        return len(self.items)


@pytest.mark.parametrize(
    "dataset", [IterOnly(), Chunks(), Plain(range(3)), Sized(range(3))], ids=lambda d: type(d).__name__
)
def test_iterables_without_an_index_are_streams(dataset: Any) -> None:
    assert is_stream(dataset)
    check_dataset(dataset, split="train")
    assert first_item(dataset) == 0
    assert known_length(dataset) == (3 if isinstance(dataset, Sized) else None)


def test_datasets_with_an_index_are_none() -> None:
    assert not is_stream(Rows([5, 6]))
    assert first_item(Rows([5, 6])) == 5
    assert known_length(Rows([5, 6])) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, r"job\.dataset\('train'\) returns None; return a dataset \(only the validation set may be missing\)"),
        (DataLoader(Rows([1])), r"returns a DataLoader; return its \.dataset instead, its collate_fn from"),
        (iter([1]), r"returns a list_iterator, which can be read only once; return an IterableDataset"),
        (object.__new__(ray.data.Dataset), r"returns a Dataset, which only the workers of a run can read"),
        (Rows([]), r"job\.dataset\('train'\): the dataset is empty"),
        (7, r"int must be map-style, with __len__ and __getitem__, or a stream, with __iter__"),
    ],
    ids=["none", "loader", "iterator", "ray", "empty", "no dataset"],
)  # fmt: skip
def test_what_is_no_dataset_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_dataset(dataset, split="train")
    with pytest.raises(ValueError, match=message):
        first_item(dataset)


def test_helpers_have_every_kind() -> None:
    assert all(is_stream(kind([])) for kind in KINDS.values())


class TakesArguments(Plain):
    """As the streams of LitData and MosaicML do."""

    def state_dict(self, num_samples: int) -> dict[str, Any]:
        return {"n": num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_a_state_that_needs_arguments_is_not_used() -> None:
    reader = StreamReader(TakesArguments(list(range(8))))
    assert reader.read(4, first=0, end=4) == [0, 1, 2, 3]
    assert reader.bookmark(4) == Mark(seen=[0, digest([0])])
    assert reader.resume_advice.startswith("its state_dict() needs num_samples; wrap it in a stream that counts")


class Wrapped:
    """A stream of a user around one of a library."""

    def __init__(self, *streams: Any):
        self.parts = {"streams": streams, "path": Path("somewhere"), "self": self, "function": divides_by_rank}

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(*self.parts["streams"])


@pytest.mark.parametrize(
    ("module", "divides"),
    [("litdata.streaming.dataset", "LitData"), ("streaming.base", "MosaicML Streaming"), ("my.streaming", None)],
)
def test_streams_that_divide_their_samples_by_rank_are_known(module: str, divides: str | None) -> None:
    kind = type("StreamingDataset", (Plain,), {"__module__": module})
    for stream in (kind([]), type("Mine", (kind,), {})([]), Wrapped([1], kind([])), Wrapped(Wrapped(kind([])))):
        assert divides_by_rank(stream) == divides


def test_a_splitter_of_webdataset_is_known() -> None:
    def split_by_node(shards: Any) -> Any:
        return shards

    assert divides_by_rank(Wrapped(split_by_node)) is None
    split_by_node.__module__ = "webdataset.shardlists"
    assert divides_by_rank(Wrapped([split_by_node])) == "split_by_node of WebDataset"
