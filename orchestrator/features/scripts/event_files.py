"""The scalars in the event files of TensorBoard that a script writes, with whatever library, as the files grow.

A file is a sequence of records: the length of the data in 8 bytes, 4 bytes of checksum, the data, 4 bytes of checksum.
The data is a message of protocol buffers, of which only a few fields are read here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

MARK = "tfevents"
"""A part of the name of every such file."""
_HEADER_BYTES, _CHECKSUM_BYTES = 12, 4
_LARGEST_BYTES = 1 << 20
"""Larger records have images or texts."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TIME, _STEP, _SUMMARY = 1, 2, 5
"""The fields of an event."""
_VALUE = 1
"""The field of a summary, repeated."""
_TAG, _NUMBER, _TENSOR = 1, 2, 8
"""The fields of a value."""
_FLOATS, _DOUBLES, _CONTENT, _TYPE = 5, 6, 4, 1
"""The fields of a tensor."""
_FORMS = {1: "f", 2: "d"}
"""By the type of a tensor."""

Scalars = tuple[int, float, dict[str, float]]
"""A step, the time, and values by tag."""


class EventFiles:
    """The event files of a script, of which each record is read once."""

    def __init__(self) -> None:
        self._read: dict[Path, int] = {}

    def read(self, found: Iterable[Path] = ()) -> list[Scalars]:
        """Return what has been added to the known files and to those ``found``: an entry for each step in a row."""
        self._read |= {path: 0 for path in found if path not in self._read}
        return [scalars for path in self._read for scalars in self._added(path)]

    def _added(self, path: Path) -> Iterator[Scalars]:
        last: Scalars | None = None
        for record in self._records(path):
            try:
                step, time, values = _event(record)
            except (ValueError, IndexError, struct.error):  # no event
                continue
            if last is not None and values and step == last[0]:
                last = (step, time, last[2] | values)
            elif values:
                yield from [] if last is None else [last]
                last = (step, time, values)
        yield from [] if last is None else [last]

    def _records(self, path: Path) -> Iterator[bytes]:
        try:
            with path.open("rb") as file:
                file.seek(self._read[path])
                while len(header := file.read(_HEADER_BYTES)) == _HEADER_BYTES:
                    (length,) = struct.unpack_from("<Q", header)
                    end = self._read[path] + _HEADER_BYTES + length + _CHECKSUM_BYTES
                    if end > path.stat().st_size:  # not complete yet
                        return
                    if length <= _LARGEST_BYTES:
                        yield file.read(length)
                    self._read[path] = file.seek(end)
        except OSError:  # removed, or on a file system that has gone
            return


def _event(record: bytes) -> Scalars:
    step, time, values = 0, 0.0, dict[str, float]()
    for field, kind, content in _fields(record):
        if (field, kind) == (_TIME, _FIXED64):
            (time,) = struct.unpack("<d", content)
        elif (field, kind) == (_STEP, _VARINT):
            step = int.from_bytes(content, "little")
        elif (field, kind) == (_SUMMARY, _BYTES):
            for inner, inner_kind, value in _fields(content):
                if (inner, inner_kind) == (_VALUE, _BYTES):
                    values |= _scalar(value)
    if not (0 <= step < 2**63 and math.isfinite(time)):
        raise ValueError(step)
    return step, time, values


def _scalar(value: bytes) -> dict[str, float]:
    tag, number = "", None
    for field, kind, content in _fields(value):
        if (field, kind) == (_TAG, _BYTES):
            tag = content.decode()
        elif (field, kind) == (_NUMBER, _FIXED32):
            (number,) = struct.unpack("<f", content)
        elif (field, kind) == (_TENSOR, _BYTES):
            number = _only_number(content)
    return {} if number is None or not tag else {tag: number}


def _only_number(tensor: bytes) -> float | None:
    """Return the number of a tensor that has one; None for any other."""
    form, found = "", b""
    for field, _, content in _fields(tensor):
        if field == _TYPE:
            form = _FORMS.get(int.from_bytes(content, "little"), "")
        elif field in (_FLOATS, _DOUBLES, _CONTENT):
            found += content
    return float(struct.unpack(f"<{form}", found)[0]) if form and len(found) == struct.calcsize(form) else None


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield the number, the kind and the content of each field, that of a varint as its bytes without the marks."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield key >> 3, kind, value.to_bytes(10, "little")
            continue
        length = {_FIXED64: 8, _FIXED32: 4}.get(kind)
        if kind == _BYTES:
            length, place = _varint(message, place)
        if length is None or place + length > len(message):
            raise ValueError(kind)
        yield key >> 3, kind, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return value, place
        if shift > 63:
            raise ValueError(value)
