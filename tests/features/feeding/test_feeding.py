"""Samples by number, cut into shares, and a feeder of a user's stream without Ray."""

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from helpers.files.golden import Golden
from helpers.jobs.library_streams import LIBRARIES, LibraryRows
from helpers.jobs.toys import Rows, Toy
from helpers.ranks.streams import KINDS
from orchestrator.features.feeding.client import FedReader, FedSplit
from orchestrator.features.feeding.feed import Feed, Request, Share
from orchestrator.features.feeding.feeder import About, Feeder
from orchestrator.features.feeding.needs import Need, shortage
from orchestrator.features.feeding.rows import digest
from orchestrator.features.feeding.window import Blocks, Window, shuffled
from orchestrator.job import Split
from orchestrator.strategies.data.columns import Columns, joined
from orchestrator.strategies.data.datasets import make_batch
from orchestrator.worker.data.data_loader import ReadFailure
from orchestrator.worker.data.stream import Mark, StreamReader

TABLES = {name: np.arange(start, start + rows) for name, start, rows in (("a", 0, 5), ("b", 5, 1), ("c", 6, 9))}


def values(parts: list[Any]) -> list[int]:
    return joined([part.load(lambda ref: {"n": TABLES[ref]}) for part in parts]).columns["n"].tolist()


def blocks(order: Any = None) -> Blocks:
    return Blocks([("a", 2, 3), ("b", 0, 1), ("c", 0, 9)], order)


@pytest.mark.parametrize("order", [None, shuffled(13, seed=1, epoch=0, window=0)], ids=["own order", "shuffled"])
def test_a_share_of_blocks_has_the_samples_of_its_numbers(order: Any) -> None:
    whole = np.arange(2, 15) if order is None else np.arange(2, 15)[order]
    for start, stop in itertools.combinations(range(14), 2):
        assert values([blocks(order).part(start, stop)]) == whole[start:stop].tolist()


def test_a_window_follows_the_numbers_of_its_chunks() -> None:
    window = Window(3)
    window.add(0, blocks())
    window.add(13, blocks())
    assert (window.start, window.end) == (3, 26)
    assert values(window.parts(11, 15)) == [13, 14, 2, 3]
    window.drop_before(13)
    assert (window.start, values(window.parts(13, 14))) == (13, [2])
    with pytest.raises(AssertionError):
        window.add(27, blocks())


def test_each_window_of_each_epoch_has_an_order_of_its_own() -> None:
    orders = [shuffled(50, seed=0, epoch=e, window=w).tolist() for e, w in itertools.product((0, 1), (0, 1))]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({*map(tuple, orders)}) == 4
    assert shuffled(50, seed=0, epoch=1, window=1).tolist() == orders[3]


def test_a_batch_of_columns_is_that_of_their_rows() -> None:
    columns = Columns({
        "x": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32), "y": np.arange(4),
        "name": np.array(["a", "b", "c", "d"], dtype=object),
    })  # fmt: skip
    expected, found = default_collate(list(columns)), make_batch(None, columns)
    assert found["name"] == expected["name"]
    for name in ("x", "y"):
        assert torch.equal(found[name], expected[name])
        assert found[name].dtype == expected[name].dtype
    assert make_batch(lambda items: (type(items), items[1]["y"]), columns) == (list, 1)
    assert [row["y"] for row in columns[1:3].padded(4)] == [1, 2, 2, 2]


def test_rows_of_several_shapes_are_joined() -> None:
    ragged = [Columns({"n": np.array([[1, 2]])}), Columns({"n": np.array([[1, 2, 3]])})]
    assert [value["n"].tolist() for value in joined(ragged)] == [[1, 2], [1, 2, 3]]


@dataclass(frozen=True, kw_only=True)
class Numbers(Toy):
    """Reads the numbers from 0 to 49; ``fails_at``: where the stream raises an error."""

    kind: str = "Plain"
    fails_at: int | None = None

    def dataset(self, split: Split) -> Any:
        if split == "map":
            return Rows([1, 2])
        if split == "none":
            return None
        items: Any = list(range(50))
        if self.fails_at is not None:
            items[self.fails_at :] = [None]
            return Failing(items)
        return KINDS[self.kind](items)


class Failing:
    def __init__(self, items: list[Any]):
        self.items = items

    def __iter__(self) -> Any:
        for item in self.items:
            yield item + 0


def feeder(**fields: Any) -> Feeder:
    return Feeder(Numbers(**fields), seed=0, window=0, count=8)


def request(position: int, *, rank: int = 0, generation: int = 1, **changes: Any) -> Request:
    asked = Request(asker=rank, generation=generation, position=position, count=8, first=4 * rank, end=4 * rank + 4,
                    keep=position, ahead=16)  # fmt: skip
    return replace(asked, **changes)


def once(position: int, **changes: Any) -> Request:
    return request(position, once=True, **changes)


def taken(reader: Feeder, asked: Request) -> list[int]:
    share = reader.take("train", asked)
    assert isinstance(share, Share), share
    assert share.parts is not None
    return list(joined([part.load(dict) for part in share.parts])) if share.parts else []


@pytest.mark.parametrize("kind", ["Plain", "Epochs", "Counting", "Stateful"])
def test_the_ranks_share_what_one_alone_would_read(kind: str) -> None:
    alone = StreamReader(Numbers(kind=kind).dataset("train"), batch_size=8)
    expected = [alone.read(8, first=0, end=8) for _ in range(16)]
    reader = feeder(kind=kind)
    for step, batch in enumerate(expected):
        assert taken(reader, request(8 * step)) + taken(reader, request(8 * step, rank=1)) == batch
    assert taken(reader, request(8 * 3, generation=2, rank=1)) == expected[3][4:], "far behind"


def test_a_stream_with_a_state_begins_at_the_mark_of_a_checkpoint() -> None:
    reader = feeder(kind="Stateful")
    share = [reader.take("train", request(8 * step)) for step in range(4)][-1]
    assert isinstance(share, Share)
    assert share.mark == Mark(position=32, epoch=0, state={"done": 32, "shards": {"open": [0, 2]}})
    again = feeder(kind="Stateful")
    assert taken(again, request(32, mark=share.mark)) == taken(reader, request(32))
    assert again.take("train", request(32)).notes == ()
    without = feeder().take("train", request(32))
    assert [note.partition(";")[0] for note in without.notes] == [
        "train data: reading past 32 samples of the stream to the next one"
    ]


def torchdata_nodes() -> Any:
    nodes = pytest.importorskip("torchdata.nodes", reason="the optional package is missing: pip install torchdata")
    return nodes.Loader(nodes.Prefetcher(nodes.IterableWrapper(range(37)), 4))


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets", reason="the optional package is missing: pip install datasets")
    rows = datasets.IterableDataset.from_generator(lambda shard: map(row, shard), gen_kwargs={"shard": list(range(12))})
    return rows.shuffle(seed=1, buffer_size=1)


def row(shard: int) -> dict[str, int]:
    return {"shard": shard}


@dataclass(frozen=True, kw_only=True)
class OfLibrary(Toy):
    make: Any

    def dataset(self, split: Split) -> Any:
        return self.make()


@pytest.mark.parametrize("make", [torchdata_nodes, pytest.param(hugging_face, marks=pytest.mark.slow)])
def test_streams_of_libraries_begin_at_the_mark_of_a_checkpoint(make: Any) -> None:
    """Within an epoch, and in a later one."""
    whole, alone = Feeder(OfLibrary(make=make), seed=0, window=0, count=8), StreamReader(make(), batch_size=8)
    for step in range(12):
        assert taken(whole, request(8 * step, end=8)) == alone.read(8, first=0, end=8)
        share = whole.take("train", request(8 * step))
        assert isinstance(share, Share)
        assert share.mark is not None
        mark = Mark.from_json(json.loads(json.dumps(share.mark.to_json())))
        again = Feeder(OfLibrary(make=make), seed=0, window=0, count=8)
        following = request(8 * step + 8, end=8)
        assert taken(again, replace(following, mark=mark)) == taken(whole, following)
        assert again.take("train", following).notes == ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIBRARIES)
def test_streams_of_files_begin_at_the_mark_of_a_checkpoint(tmp_path: Path, kind: str) -> None:
    """LitData and MosaicML in the class of the page about data; WebDataset is read again."""
    write, opened = LIBRARIES[kind]
    write(folder := tmp_path / "rows")
    job, count = LibraryRows(kind=kind, folder=str(folder)), 36

    def batch(reader: Feeder, position: int, mark: Mark | None = None) -> tuple[Share, list[float]]:
        asked = Request(asker=0, generation=1, position=position, count=count, first=0, end=count, keep=position,
                        ahead=0, mark=mark)  # fmt: skip
        share = reader.take("train", asked)
        assert isinstance(share, Share), share
        assert share.parts is not None
        return share, [float(row["x"][0]) for part in share.parts for row in part.load(dict)]

    whole = Feeder(job, seed=0, window=0, count=count)
    read = [batch(whole, count * step) for step in range(24)]
    whole.close("train")
    alone = StreamReader(opened(folder), batch_size=count)
    assert [values for _, values in read] == [
        [float(row["x"][0]) for row in alone.read(count, first=0, end=count)] for _ in range(24)
    ]
    for step in (5, 15):
        mark = read[step][0].mark
        assert mark is not None
        again = Feeder(job, seed=0, window=0, count=count)
        share, values = batch(again, count * (step + 1), Mark.from_json(json.loads(json.dumps(mark.to_json()))))
        assert values == read[step + 1][1]
        assert len(share.notes) == (kind == "webdataset")
        again.close("train")


def test_only_what_ranks_may_ask_for_again_is_kept() -> None:
    reader = feeder()
    for step in range(6):
        for rank in (0, 1):
            taken(reader, request(8 * step, rank=rank, keep=max(0, 8 * (step - rank))))
    feed = reader._feeds["train", 0]
    assert (feed._window.start, feed._reading) == (32, 1), "rank 1 may ask for the batch before its last one"
    assert feed._window.end <= 48 + 16 + 8
    taken(reader, request(32, rank=1))
    assert feed._reading == 1
    assert taken(reader, request(0, rank=1)) == [4, 5, 6, 7]
    assert feed._reading == 2


class Large:
    """Chunks of 13 rows and 30 bytes."""

    sample_bytes = 30 / 13
    first_read: tuple[int, str] | None = None

    def __init__(self) -> None:
        self.notes: list[str] = []

    def read(self, mark: Mark | None, position: int) -> Any:
        for number in range(20):
            yield 13 * number, Blocks([("a", 2, 3), ("b", 0, 1), ("c", 0, 9)], num_bytes=30)

    def mark(self, position: int) -> None:
        return None


def test_an_answer_has_the_shares_of_the_batches_that_are_there_in_the_same_chunk() -> None:
    asked = request(0, count=4, end=2, ahead=8)
    share, *alone = (Feed(Large).take(replace(asked, position=position)) for position in (0, 4, 8))
    assert [values([*following.parts]) for following in share.further] == [values([*one.parts]) for one in alone]
    assert [following.count for following in share.further] == [4, 4]


def test_rows_that_fill_the_object_store_are_told_of_once() -> None:
    """And what is kept of them is measured."""
    small, large = Feed(Large, store_bytes=1000), Feed(Large, store_bytes=100)
    for step in range(10):
        for feed, notes in ((small, 0), (large, 1)):
            share = feed.take(request(8 * step))
            assert isinstance(share, Share)
            assert share.rows_per_s > 0
            assert share.kept_mb in (30e-6, 60e-6, 90e-6)
            assert len(share.notes) <= notes
    assert share.notes[0].startswith("the rows that are read ahead take ")


def test_batches_ahead_that_do_not_fit_into_the_object_store_are_refused(golden: Golden) -> None:
    """A batch of 8 samples and two ahead of it take 24 * 30 / 13 bytes."""
    for position in (0, 9):  # a resume may begin near the end of a block
        assert isinstance(Feed(Large, store_bytes=56).take(request(position)), Share)
        failure = Feed(Large, store_bytes=55).take(request(position))
        assert isinstance(failure, ReadFailure)
        assert failure.is_of_job
    golden.says(failure.message)


@pytest.mark.parametrize(
    ("needs", "free", "found"),
    [
        ([("Read", {"CPU": 1}, 0)], [{"CPU": 1}], None),
        ([("Read", {"CPU": 1}, 0)], [{"CPU": 0.5}, {"CPU": 0.5}], "Read has tasks of 1 CPU"),
        ([("Read", {"CPU": 1}, 0), ("Map", {"CPU": 1}, 1)], [{"CPU": 2}], None),
        ([("R", {"CPU": 1}, 0), ("M", {"CPU": 1}, 1)], [{"CPU": 1}],
         "R has tasks of 1 CPU, beside actors of the data (1)"),
        ([("Map", {"CPU": 1}, 3)], [{"CPU": 1}, {"CPU": 1}], "Map keeps actors, 3 of 1 CPU"),
        ([("Map", {"CPU": 0, "GPU": 1}, 1)], [{"CPU": 4}], "Map keeps actors, 1 of 1 GPU"),
        ([("A", {"CPU": 1}, 2), ("B", {"CPU": 3}, 1)], [{"CPU": 3}, {"CPU": 2}], None),
    ],
)  # fmt: skip
def test_what_makes_the_data_needs_room_beside_the_workers(needs: Any, free: Any, found: str | None) -> None:
    assert shortage([Need(*need) for need in needs], free) == found


def test_an_earlier_generation_is_not_answered() -> None:
    reader = feeder()
    taken(reader, request(8, generation=2))
    assert reader.take("train", request(0)) is None


def test_an_error_of_the_stream_is_told_to_every_rank_and_tried_again_in_the_next_generation() -> None:
    reader = feeder(fails_at=10)
    assert taken(reader, request(0)) == [0, 1, 2, 3]
    for rank in (0, 1):
        failure = reader.take("train", request(8, rank=rank))
        assert isinstance(failure, ReadFailure)
        assert failure.message.startswith("train data, sample 10 of the stream: TypeError: unsupported operand")
    again = reader.take("train", request(8, generation=2))
    assert isinstance(again, ReadFailure)
    assert reader._feeds["train", 0]._reading == 2
    assert taken(reader, request(0, generation=3)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("keep_bytes", "readings"), [(600, 1), (100, 2)])
def test_a_small_split_that_is_read_again_and_again_is_kept(keep_bytes: float, readings: int) -> None:
    feed = Feed(Large, keep_bytes=keep_bytes)
    for step in (*range(10), 0):
        share = feed.take(once(8 * step))
        assert isinstance(share, Share)
    assert share.reading == readings


def test_a_split_that_is_evaluated_ends_and_is_read_again() -> None:
    reader = feeder()
    taken(reader, request(8))
    for _ in range(2):
        ends = [reader.take("train", once(8 * step, rank=1)) for step in range(5, 8)]
        assert [share.count for share in ends] == [8, 2, 0]
        assert taken(reader, once(48)) == [48, 49]
        assert taken(reader, once(48, rank=1)) == [49], "the last sample, in place of none"
        assert taken(reader, once(0)) == [0, 1, 2, 3]
    assert taken(reader, request(16)) == [16, 17, 18, 19], "training reads on beside it"
    assert reader._feeds["train", 0]._reading == 1


@pytest.mark.parametrize(
    ("rows", "tells"), [([1, 2, 3, 4], True), ([1, 1, 1, 2], True), ([5, 5, 5, 5], False), ([5], True)]
)
def test_a_checkpoint_keeps_a_digest_of_rows_that_are_not_all_alike(rows: list[int], tells: bool) -> None:
    """Of such rows, others would have the same digest, and files could be skipped that a function makes shorter."""
    nothing: Any = None
    reader = FedReader(FedSplit(nothing, "train", None), nothing)
    reader._recent.append((request(8), Mark(position=16, epoch=0, state={"row": 16}), Columns({"n": np.array(rows)})))
    mark = reader.bookmark(16)
    assert mark is not None
    assert mark.state == {
        "row": 16,
        **({"seen": [8, len(rows), digest(Columns({"n": np.array(rows)}))]} if tells else {}),
    }


def test_blocks_that_are_lost_are_read_again() -> None:
    feed = Feed(Large)
    share = feed.take(request(8))
    assert isinstance(share, Share)
    again = feed.take(request(8, lost=share.reading))
    assert isinstance(again, Share)
    assert again.reading == share.reading + 1
    assert again.parts is not None
    share = feed.take(request(8, lost=1))
    assert isinstance(share, Share)
    assert share.reading == again.reading, "another rank has told of it"


def test_what_is_no_stream_is_left_to_the_ranks() -> None:
    reader = feeder()
    assert [reader.about(split) for split in ("train", "map", "none")] == [About(True), About(False), About(False)]
    assert list(reader.head("train", 3)) == [0, 1, 2]
    assert list(reader.head("train", 60)) == list(range(50))
