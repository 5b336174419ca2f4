"""Stored examples, read where they lie: lines of JSON or of text, and rows of tables."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

_HALF = re.compile(r"\\u[dD][89a-fA-F]..")
"""The escape of half a character, which is a whole one beside its other half."""


class Rows(Protocol):
    """Stored examples by number. ``row`` may raise any error about one; ``name`` is what the user calls it."""

    def __len__(self) -> int: ...
    def __hash__(self) -> int: ...
    def row(self, number: int) -> Mapping[str, Any]: ...
    def name(self, number: int) -> str: ...


def open_rows(path: Path) -> Rows:
    """Open ``.jsonl``, ``.parquet``, a directory of ``datasets.save_to_disk``, or a text with an example in each line.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or ``datasets`` is not installed.
    """
    state = path.stat()
    return _opened(path, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _opened(path: Path, size: int, changed_ns: int) -> Rows:
    """Return the rows of a file, which is looked through once for each of its states."""
    if path.is_dir():
        return Table(path, _saved(path))
    if path.suffix != ".parquet":
        return Lines(path)
    from pyarrow import ArrowInvalid, parquet

    try:
        return Table(path, parquet.read_table(path, memory_map=True))
    except ArrowInvalid as e:
        raise ValueError(f"is no parquet file: {e}") from e


def _saved(path: Path) -> Any:
    try:
        import datasets
    except ImportError as e:
        raise ValueError("is a directory, and datasets is not installed: pip install datasets") from e
    try:
        found = datasets.load_from_disk(str(path))
    except FileNotFoundError as e:
        raise ValueError("is a directory without a dataset of datasets.save_to_disk; name a file in it") from e
    if isinstance(found, datasets.DatasetDict):
        raise ValueError(f"has several datasets; name one of {', '.join(str(path / name) for name in found)}")
    return found.data.table


class Table:
    """The rows of a table of ``pyarrow``."""

    def __init__(self, path: Path, table: Any):
        self.path, self.table = path, table

    def __len__(self) -> int:
        return len(self.table)

    def row(self, number: int) -> Mapping[str, Any]:
        (found,) = self.table.slice(number, 1).to_pylist()
        return {name: value for name, value in found.items() if value is not None}

    def name(self, number: int) -> str:
        return f"{self.path}, row {number + 1}"


class Lines:
    """The lines of a file that are not empty, mapped into memory."""

    def __init__(self, path: Path):
        self.path = path
        self.is_json = path.suffix == ".jsonl"
        data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        ends = np.flatnonzero(data == ord("\n")) + 1
        if not len(ends) or ends[-1] < len(data):
            ends = np.append(ends, len(data))
        starts = np.concatenate([[0], ends[:-1]])
        lengths = ends - starts - (data[ends - 1] == ord("\n")) if len(data) else ends
        self.numbers = np.flatnonzero(lengths)
        self.starts, self.ends = starts[self.numbers], ends[self.numbers]
        self.data = data

    def __len__(self) -> int:
        return len(self.numbers)

    def row(self, number: int) -> Mapping[str, Any]:
        line = bytes(self.data[self.starts[number] : self.ends[number]]).decode("utf-8-sig")
        if not self.is_json:
            return {"text": line.rstrip("\r\n")}
        try:
            example = json.loads(line)
            if half := _HALF.search(line):
                json.dumps(example, ensure_ascii=False).encode()
        except RecursionError as e:
            raise ValueError(f"is no JSON ({e})") from None
        except UnicodeEncodeError:
            assert half is not None
            raise ValueError(f"has half a character, such as {half[0]}") from None
        if not isinstance(example, dict):
            raise ValueError(f"is {type(example).__name__}, not an object of JSON")
        return example

    def name(self, number: int) -> str:
        return f"{self.path}, line {self.numbers[number] + 1}"


@functools.lru_cache(maxsize=4)
def damaged(rows: Rows, fields: tuple[tuple[str, ...], ...], first: int | None = None) -> tuple[int, ...]:
    """Return the rows, of the ``first`` ones or of all, that cannot be read or have no combination of fields."""

    def is_damaged(number: int) -> bool:
        try:
            row = rows.row(number)
        except ValueError:
            return True
        return not any(all(name in row for name in names) for names in fields)

    return tuple(number for number in range(len(rows))[:first] if is_damaged(number))
