"""Values with the text that was typed for them.

``1.10`` is a number to Hydra and YAML, but a text field gets these four characters. Whether a field is a text is known
only when its section, or the job, is built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_MARKED = re.compile("\0([^\0]*)\0([^\0]*)\0")


class Typed(str):
    """The text that was typed for a ``value`` that is something else: a number, true, false or null."""

    __slots__ = ("value",)
    value: Any

    def __new__(cls, text: str, value: Any) -> Typed:
        typed = super().__new__(cls, text)
        typed.value = value
        return typed

    def __getnewargs__(self) -> tuple[str, Any]:  # type: ignore[override]
        return str(self), self.value

    def __eq__(self, other: object) -> bool:
        """Compare as text with texts, and as the value with anything else."""
        return str(self) == other if isinstance(other, str) else bool(self.value == other)

    __hash__ = str.__hash__

    def __lt__(self, other: Any) -> bool:
        """Compare values, for ``sort(10,9)`` in an override."""
        return bool(self.value < plain(other))


def plain(data: Any) -> Any:
    """Return nested mappings and lists with values in place of typed texts."""
    if isinstance(data, Typed):
        return data.value
    if isinstance(data, Mapping):
        return {plain(key): plain(value) for key, value in data.items()}
    return type(data)(map(plain, data)) if type(data) in (list, tuple) else data


def mark(data: Any) -> Any:
    """Return nested mappings and lists with typed texts as strings of a form of their own, which OmegaConf can hold."""
    if isinstance(data, Typed):
        return f"\0{data}\0{json.dumps(data.value)}\0"
    if isinstance(data, Mapping):
        return {mark(key): mark(value) for key, value in data.items()}
    return list(map(mark, data)) if isinstance(data, list) else data


def unmark(data: Any) -> Any:
    """Undo :func:`mark`. A mark that an interpolation has put into a longer text becomes the typed text."""
    if isinstance(data, str):
        whole = _MARKED.fullmatch(data)
        return _MARKED.sub(r"\1", data) if whole is None else Typed(whole[1], json.loads(whole[2]))
    if isinstance(data, Mapping):
        return {unmark(key): unmark(value) for key, value in data.items()}
    return list(map(unmark, data)) if isinstance(data, list) else data
