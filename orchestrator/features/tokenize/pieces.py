"""Pieces of a corpus, which processes read independently of each other: a part of a file, with whole documents.

A text is one document, and its pieces are encoded one by one; so it is cut only after a line break and before a letter,
where tokenizers begin a new word. JSONL (``.jsonl``) has a document in each line, parquet (``.parquet``) in each row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PIECE_BYTES = 4 * 2**20
_CHUNK_BYTES = 2**20
_COUNTED_BYTES = 2**24
_LINE = re.compile(rb"\n")
_LINE_BEFORE_WORD = re.compile(rb"\n(?=\S)")


@dataclass(frozen=True, kw_only=True)
class TextPiece:
    """A part of a file: bytes ``[start, stop)``, or of parquet the group of rows with the number ``start``.

    Attributes:
        size: its share of the size of the file.
        ends: whether its last document ends with it.
    """

    path: Path
    start: int
    stop: int
    size: int
    ends: bool = True


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A line or a row without a document. ``place`` is the offset of the line in bytes, or the number of the row."""

    path: Path
    place: int
    reason: str

    def __str__(self) -> str:
        if self.path.suffix == ".parquet":
            return f"{self.path}, row {self.place + 1}: {self.reason}"
        return f"{self.path}, line {_line_number(self.path, self.place)}: {self.reason}"


def pieces_of(paths: Sequence[Path]) -> list[TextPiece]:
    """Return the pieces of files in order; they depend on the files only.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is no parquet, or ``pyarrow`` is not installed.
    """
    return [piece for path in paths for piece in (_row_groups if path.suffix == ".parquet" else _parts)(path)]


def documents(piece: TextPiece, field: str) -> Iterator[str | Damaged]:
    """Yield the documents of a piece, of a text the one part of it.

    Args:
        field: where an object in JSON or a row has its text.

    Raises:
        OSError: the file cannot be read.
        ValueError: a text is not UTF-8, or a table has no such column of texts.
    """
    if piece.path.suffix == ".parquet":
        yield from _rows(piece, field)
        return
    with piece.path.open("rb") as file:
        file.seek(piece.start)
        data = file.read(piece.stop - piece.start)
    if piece.path.suffix != ".jsonl":
        try:
            yield data.decode()
        except UnicodeDecodeError as e:
            raise ValueError(f"{piece.path}: byte {piece.start + e.start + 1} is not UTF-8") from None
        return
    place = piece.start
    for line in data.splitlines(keepends=True):
        found = _text_of(line, field)
        yield found if isinstance(found, str) else Damaged(path=piece.path, place=place, reason=found[0])
        place += len(line)


def _text_of(line: bytes, field: str) -> str | tuple[str]:
    """Return the text in a line of JSON, or why there is none, in a tuple."""
    if not line.strip():
        return ("it is empty",)
    try:
        value: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return ("it is not UTF-8",)
    except (ValueError, RecursionError) as e:
        return (f"it is no JSON ({e})",)
    if not isinstance(value, dict) or field not in value:
        return (f"it has no field {field!r}; --field names another",)
    return _checked(value[field], field)


def _checked(text: object, field: str) -> str | tuple[str]:
    if not isinstance(text, str):
        return (f"its {field!r} is no text",)
    try:
        text.encode()
    except UnicodeEncodeError as e:
        return (f"its {field!r} has half a character, \\u{ord(text[e.start]):x}",)
    return text or (f"its {field!r} is empty",)


def _parts(path: Path) -> list[TextPiece]:
    has_lines = path.suffix == ".jsonl"
    pattern = _LINE if has_lines else _LINE_BEFORE_WORD
    size = path.stat().st_size
    starts = [0]
    with path.open("rb") as file:
        while (start := _after(pattern, file, starts[-1] + PIECE_BYTES)) is not None:
            starts.append(start)
    ends = [*starts[1:], size]
    return [
        TextPiece(path=path, start=start, stop=stop, size=stop - start, ends=has_lines or stop == size)
        for start, stop in zip(starts, ends, strict=True)
        if size
    ]


def _after(pattern: re.Pattern[bytes], file: Any, offset: int) -> int | None:
    """Return where the first match of a pattern ends that begins at ``offset`` or later; None if there is none."""
    file.seek(offset)
    kept = b""
    while chunk := file.read(_CHUNK_BYTES):
        window = kept + chunk
        if found := pattern.search(window):
            return int(file.tell()) - len(window) + found.end()
        kept = window[-1:]
    return None


def _line_number(path: Path, offset: int) -> int:
    lines, left = 1, offset
    with path.open("rb") as file:
        while left > 0 and (chunk := file.read(min(left, _COUNTED_BYTES))):
            lines, left = lines + chunk.count(b"\n"), left - len(chunk)
    return lines


def _row_groups(path: Path) -> list[TextPiece]:
    with _parquet(path) as table:
        groups = table.metadata.num_row_groups
    size = path.stat().st_size // max(1, groups)
    return [TextPiece(path=path, start=group, stop=group + 1, size=size) for group in range(groups)]


def _rows(piece: TextPiece, field: str) -> Iterator[str | Damaged]:
    with _parquet(piece.path) as table:
        if field not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise ValueError(f"{piece.path}: has no column {field!r}, but {names}; --field names one")
        row = sum(table.metadata.row_group(group).num_rows for group in range(piece.start))
        for text in table.read_row_group(piece.start, columns=[field]).column(field).to_pylist():
            found = _checked(text, field)
            yield found if isinstance(found, str) else Damaged(path=piece.path, place=row, reason=found[0])
            row += 1


def _parquet(path: Path) -> Any:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    opened: Callable[[Path], Any] = ParquetFile
    try:
        return opened(path)
    except ArrowException as e:
        raise ValueError(f"{path}: {e}") from e
