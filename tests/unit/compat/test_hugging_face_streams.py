"""Streams of Hugging Face ``datasets``: a run continues at the exact next sample."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.ranks.streams import Stateful
from orchestrator.compat.streams import loses_samples
from orchestrator.strategies.data.datasets import is_stream, known_length
from orchestrator.worker.data.stream import Mark, StreamReader

datasets = pytest.importorskip("datasets", reason="the optional package is missing: pip install datasets")

FILES, LINES = 3, 7
N = FILES * LINES


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("lines")
    for number in range(FILES):
        rows = (json.dumps({"file": number, "line": line}) for line in range(LINES))
        (folder / f"{number}.jsonl").write_text("\n".join(rows))
    return sorted(map(str, folder.iterdir()))


@pytest.fixture(autouse=True)
def cached_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)


def read_json(files: list[str]) -> Any:
    return datasets.load_dataset("json", data_files=files, streaming=True, split="train")


def mapped(files: list[str]) -> Any:
    return read_json(files).map(negated, batched=True, batch_size=4).filter(has_other_line)


def negated(rows: dict[str, list[int]]) -> dict[str, list[int]]:
    return {"negative": [-line for line in rows["line"]]}


def has_other_line(row: dict[str, int]) -> bool:
    return row["line"] != 3


def interleaved(files: list[str]) -> Any:
    return datasets.interleave_datasets([read_json(files), read_json(files[1:])])


def files_shuffled(files: list[str]) -> Any:
    return read_json(files).shuffle(seed=1, buffer_size=1)


def shuffled(files: list[str]) -> Any:
    return read_json(files).shuffle(seed=1, buffer_size=5)


def mapped_after_shuffle(files: list[str]) -> Any:
    return datasets.concatenate_datasets([shuffled(files), read_json(files)]).filter(has_other_line)


def resumed(make: Callable[[], Any], whole: StreamReader, position: int, *, count: int) -> tuple[list[Any], int]:
    """What a new process reads from ``position``, and how many samples it drops before."""
    new = StreamReader(make())
    if (mark := whole.bookmark(position)) is not None:
        new.add_bookmark(Mark.from_json(json.loads(json.dumps(mark.to_json()))))
    dropped = new.go_to_mark(position)
    new.skip(dropped)
    return new.read(count, first=0, end=count), dropped


@pytest.mark.parametrize("kind", [read_json, mapped, interleaved, files_shuffled, shuffled, mapped_after_shuffle])
def test_a_resumed_stream_continues_at_the_next_sample(kind: Callable[[list[str]], Any], files: list[str]) -> None:
    def make() -> Any:
        return kind(files)

    stream = make()
    assert is_stream(stream)
    assert known_length(stream) is None
    whole, ahead = StreamReader(stream), StreamReader(make())
    expected = ahead.read(3 * N, first=0, end=3 * N)
    for position in (1, 5, 6, LINES, N - 4, N, N + 1, 2 * N):
        whole.skip(position - 1 - whole.position)
        assert whole.read(1, first=0, end=1) == expected[position - 1 : position]
        found, dropped = resumed(make, whole, position, count=LINES)
        assert found == expected[position : position + LINES], position
        assert (dropped > 0) <= loses_samples(stream)


def test_the_order_of_shuffled_samples_depends_on_the_epoch(files: list[str]) -> None:
    reader = StreamReader(shuffled(files))
    first, second = reader.read(N, first=0, end=N), reader.read(N, first=0, end=N)
    assert first != second
    assert sorted(map(str, first)) == sorted(map(str, second))


def test_a_state_that_leaves_samples_out_is_recognised(files: list[str]) -> None:
    assert [loses_samples(kind(files)) for kind in (read_json, mapped, interleaved, files_shuffled)] == [False] * 4
    assert loses_samples(shuffled(files))
    assert loses_samples(mapped_after_shuffle(files))
    assert not loses_samples(Stateful(range(5)))
