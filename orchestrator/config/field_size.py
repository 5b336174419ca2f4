"""How much the fields of a job may hold: each record of a run repeats them, and data belongs into its datasets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

MAX_VALUES = 2000
"""Enough for the names of ImageNet's classes; to write so many takes half a second."""
MAX_CHARACTERS = 2**17


def too_large(fields: Mapping[str, Any]) -> list[str]:
    """Return an error for each field of a job that holds more than the records of a run can have."""
    return [
        f"job.{name}: holds more than {excess}, which every record of the run would repeat; let Job.dataset read data, "
        "such as from a file that the field names"
        for name, value in fields.items()
        if (excess := _excess(value)) is not None
    ]


def field_values(job: Any) -> dict[str, Any]:
    """Return the fields of a job by name; empty if it is no dataclass."""
    return {f.name: getattr(job, f.name) for f in dataclasses.fields(job)} if dataclasses.is_dataclass(job) else {}


def _excess(value: Any) -> str | None:
    values = characters = 0
    for length in _lengths(value):
        values, characters = values + 1, characters + length
        if values > MAX_VALUES:
            return f"{MAX_VALUES:,} values"
        if characters > MAX_CHARACTERS:
            return f"{MAX_CHARACTERS:,} characters"
    return None


def _lengths(value: Any) -> Iterator[int]:
    """Yield the length of each text in nested values, and 0 for each other value."""
    if isinstance(value, Mapping):
        for item in value.items():
            yield from _lengths(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _lengths(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _lengths(field_values(value))
    else:
        yield len(value) if isinstance(value, (str, bytes, bytearray)) else 0
