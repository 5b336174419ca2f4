"""Plain mappings to frozen dataclasses: strict types, limits, nearest names, ALL faults at once."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import difflib
import enum
import functools
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from orchestrator.config.redact import MASK, holds_secret

T = TypeVar("T")

_SEQUENCES = (list, tuple, collections.abc.Sequence)
_MAPPINGS = (dict, collections.abc.Mapping)


class ConfigError(ValueError):
    """The configuration or the plan is wrong; ``errors`` has one line per fault."""

    def __init__(self, errors: Iterable[str]):
        self.errors = tuple(dict.fromkeys(errors))
        super().__init__(self.errors)

    def __str__(self) -> str:
        return "\n".join(self.errors)


@contextlib.contextmanager
def gathering(errors: list[str]) -> Iterator[None]:
    """A :class:`ConfigError` in the block adds to ``errors``, so that what comes after it is checked too."""
    try:
        yield
    except ConfigError as e:
        errors += e.errors


class _Misfit(Exception):
    """The value is not of the type; ``errors`` say why where there is more to say than what was expected."""

    def __init__(self, *errors: str):
        self.errors = errors


def did_you_mean(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    """``did you mean x?``, or the list of valid names where none is near; ``prefix`` stands before each."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"valid: {', '.join(prefix + name for name in names) or 'none'}"


def format_override(key: str, value: Any) -> str:
    """``key=value`` as it would be typed, a secret masked."""
    return f"{key}={MASK if holds_secret(key, value) else to_cli(value)}"


def to_cli(value: Any) -> str:
    """The value as it would be typed on the command line."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{to_cli(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(to_cli, value)) + "]"
    return str(value)


def build(cls: type[T], data: Mapping[str, Any], path: str, errors: list[str]) -> T | None:
    """Make ``cls`` from ``data``; on any fault, append to ``errors`` and return None.

    ``path`` is the key of ``data`` in the configuration ("" for the root), used in the messages.
    """
    before = len(errors)
    try:
        hints = _hints(cls)  # type: ignore[arg-type]
    except NameError as e:
        errors.append(f"{path}: {cls.__name__}: the type of a field: {e}; import it outside `if TYPE_CHECKING:`")
        return None
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for name in sorted(str(n) for n in data if n not in fields):
        errors.append(f"{_join(path, name)}: unknown key; {_nearest_key(name, data, fields, path)}")
    values: dict[str, Any] = {}
    for name, f in fields.items():
        key = _join(path, name)
        if name in data:
            try:
                values[name] = _fit(data[name], hints[name], key, f.metadata)
            except _Misfit as e:
                errors += e.errors or [
                    f"{format_override(key, data[name])}: expected {_describe(hints[name], f.metadata)}"
                ]
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            errors.append(f"{key}: missing; give it a value")
    if len(errors) > before:
        return None
    try:
        return cls(**values)
    except ValueError as e:
        errors.append(under(path, e))
        return None


def under(path: str, error: Exception) -> str:
    """The text of ``error``, beginning with the key that it is about."""
    text = str(error)
    return text if not path or text.startswith((f"{path}.", f"{path}:", f"{path}=")) else f"{path}: {text}"


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def _nearest_key(name: str, data: Mapping[str, Any], fields: Iterable[str], path: str) -> str:
    """The nearest key of this section, or the same key in a section below: ``steps`` for ``train.steps``."""
    below = [_join(path, f"{section}.{name}") for section in fields if name in _names(data.get(section))]
    if below:
        return f"did you mean {' or '.join(below)}?"
    return did_you_mean(name, fields, prefix=_join(path, ""))


def _names(section: Any) -> Iterable[str]:
    if dataclasses.is_dataclass(section):
        return [f.name for f in dataclasses.fields(section)]
    return section if isinstance(section, Mapping) else ()


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _fit(value: Any, kind: Any, key: str, limits: Mapping[str, Any]) -> Any:
    """``value`` as ``kind``.

    Raises:
        _Misfit: it is of another type or outside the limits.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _fit_one_of(args, value, key, limits)
    if kind is Any or (isinstance(kind, type) and kind is not int and isinstance(value, kind)):
        return _within(value, key, limits)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _fit_dataclass(value, kind, key)
    if origin is Literal:
        return _fit_literal(value, args)
    if kind in (int, float) and isinstance(value, (int, kind)) and not isinstance(value, bool):
        return kind(_within(value, key, limits))
    # Hydra reads job.path=123 as a number; a text field takes the text that was typed.
    if kind in (str, Path) and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return kind(str(value))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _fit_enum(value, kind)
    if (origin or kind) in _SEQUENCES:
        return _fit_sequence(value, origin or kind, args, key)
    if (origin or kind) in _MAPPINGS and isinstance(value, Mapping):
        of_key, of_value = args or (Any, Any)
        return {_fit(k, of_key, key, {}): _fit(v, of_value, _join(key, k), {}) for k, v in value.items()}
    raise _Misfit


def _fit_one_of(kinds: tuple[Any, ...], value: Any, key: str, limits: Mapping[str, Any]) -> Any:
    errors: list[str] = []
    # The very type first, so that 3 stays a number in `str | int`.
    for kind in sorted(kinds, key=lambda k: k is not type(value)):
        try:
            return _fit(value, kind, key, limits)
        except _Misfit as e:
            errors += e.errors
    raise _Misfit(*errors)


def _fit_dataclass(value: Any, kind: type[Any], key: str) -> Any:
    if not isinstance(value, Mapping):
        raise _Misfit
    errors: list[str] = []
    built = build(kind, value, key, errors)
    if built is None:
        raise _Misfit(*errors)
    return built


def _fit_literal(value: Any, words: tuple[Any, ...]) -> Any:
    for word in words:
        same = type(word) is type(value) and word == value
        if same or (isinstance(word, str) and not isinstance(value, bool) and word == str(value)):
            return word
    raise _Misfit


def _fit_enum(value: Any, kind: type[enum.Enum]) -> enum.Enum:
    if str(value) in kind.__members__:
        return kind[str(value)]
    for member in kind:
        if type(member.value) is type(value) and member.value == value:
            return member
    raise _Misfit


def _fit_sequence(value: Any, kind: Any, args: tuple[Any, ...], key: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _Misfit
    kinds = list(args) if kind is tuple and args and args[-1] is not ... else [args[0] if args else Any] * len(value)
    if len(kinds) != len(value):
        raise _Misfit
    items = [_fit(v, k, f"{key}[{i}]", {}) for i, (v, k) in enumerate(zip(value, kinds, strict=True))]
    return items if kind is list else tuple(items)


def _within(value: Any, key: str, limits: Mapping[str, Any]) -> Any:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return value
    if not math.isfinite(value):
        raise _Misfit
    minimum, above, maximum = (limits.get(name) for name in ("minimum", "above", "maximum"))
    if minimum is not None and value < minimum:
        raise _Misfit(f"{format_override(key, value)}: must be at least {minimum}")
    if above is not None and value <= above:
        raise _Misfit(f"{format_override(key, value)}: must be greater than {above}")
    if maximum is not None and value > maximum:
        raise _Misfit(f"{format_override(key, value)}: must be at most {maximum}")
    return value


def _describe(kind: Any, limits: Mapping[str, Any]) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(a, limits) for a in args)
    if origin is Literal:
        return " or ".join(to_cli(a) for a in args)
    if kind is int and limits.get("minimum") is not None:
        return f"a whole number of at least {limits['minimum']}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " or ".join(kind.__members__)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return f"a section with the keys {', '.join(_names(kind))}"
    if (origin or kind) in _SEQUENCES:
        if origin is tuple and args[-1] is not ...:
            return f"[{', '.join(_describe(a, {}) for a in args)}]"
        return f"a list, each {_describe(args[0], {})}" if args else "a list"
    if (origin or kind) in _MAPPINGS:
        return "a mapping"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    if kind is type(None):
        return "null"
    return names.get(kind, f"a {getattr(kind, '__name__', kind)}")
