"""Values with the text that was typed for them.

``1.10`` is a number to Hydra and YAML, but a text field gets these four characters. Whether a field is a text is known
only when its section, or the job, is built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
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
    return _mapped(data, lambda value: value.value if isinstance(value, Typed) else value)


def mark(data: Any) -> Any:
    """Return nested mappings and lists with typed texts as strings of a form of their own, which OmegaConf can hold."""
    return _mapped(data, lambda v: f"\0{v}\0{json.dumps(v.value)}\0" if isinstance(v, Typed) else v)


def unmark(data: Any) -> Any:
    """Undo :func:`mark`. A mark that an interpolation has put into a longer text becomes the typed text."""
    return _mapped(data, lambda value: _unmarked(value) if isinstance(value, str) else value)


def merged(one: Any, other: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return nested data of one shape with the keys of ``other``, and ``change`` of the two values of each."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        pairs = zip(one.values(), other.items(), strict=True)
        return {key: merged(value, changed, change) for value, (key, changed) in pairs}
    if isinstance(one, list) and isinstance(other, list):
        return [merged(value, changed, change) for value, changed in zip(one, other, strict=True)]
    return change(one, other)


def _unmarked(text: str) -> str:
    whole = _MARKED.fullmatch(text)
    return _MARKED.sub(r"\1", text) if whole is None else Typed(whole[1], json.loads(whole[2]))


def _mapped(data: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested mappings, lists and tuples with ``change`` of all else, also of keys."""
    if isinstance(data, Mapping):
        return {_mapped(key, change): _mapped(value, change) for key, value in data.items()}
    return type(data)(_mapped(v, change) for v in data) if type(data) in (list, tuple) else change(data)
