"""Keys, and frozen dataclasses of them from mappings: strict types, limits, the nearest name, all errors at once."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import enum
import functools
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Optional, TypeVar, Union, get_args, get_origin, get_type_hints

from orchestrator.config.epochs import Epochs
from orchestrator.config.synonyms import instead_of_override, instead_of_value
from orchestrator.config.text import did_you_mean, format_override, to_cli
from orchestrator.config.typed import Typed, plain
from orchestrator.user_code.errors import ConfigError as ConfigError
from orchestrator.user_code.errors import exits_refused

T = TypeVar("T")

_SEQUENCES = (list, tuple, collections.abc.Sequence)
_MAPPINGS = (dict, collections.abc.Mapping)
_TEXTS = (str, Path)


@contextlib.contextmanager
def collect_errors(errors: list[str]) -> Iterator[None]:
    """Add the lines of a :class:`ConfigError` raised in the block to ``errors``, so that later checks still run."""
    try:
        with exits_refused():
            yield
    except ConfigError as e:
        errors += e.errors


class _InvalidValue(Exception):
    """The value does not fit its field. Without ``errors``, the message states the expected type."""

    def __init__(self, *errors: str):
        self.errors = errors


def option(
    meaning: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    epochs: bool = False,
) -> Any:
    """Declare a required configuration key.

    Args:
        meaning: the text that ``--help`` prints for the key.
        minimum: the smallest valid value.
        above: the exclusive lower limit.
        maximum: the largest valid value.
        below: the exclusive upper limit.
        epochs: whether a number of epochs will do in place of a number of steps.
    """
    limits = {"minimum": minimum, "above": above, "maximum": maximum, "below": below, "epochs": epochs or None}
    return dataclasses.field(metadata={"meaning": meaning, **limits})


def build(
    cls: type[T], data: Mapping[str, Any], path: str, errors: list[str], make: Callable[..., T] | None = None
) -> T | None:
    """Build the dataclass ``cls`` from ``data``, checking names, types and the limits in the fields' metadata.

    Args:
        cls: a dataclass; its fields may be dataclasses too.
        data: a value for each field.
        path: the key of ``data`` in the configuration ("" for the root), used in the messages.
        errors: receives one line per error.
        make: makes the instance of the values, in place of ``cls``.

    Returns:
        The instance, or None if there were errors.
    """
    before = len(errors)
    try:
        hints = type_hints(cls, path)
    except ConfigError as e:
        errors += e.errors
        return None
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for name in sorted(str(n) for n in data if n not in fields):
        errors.append(f"{_join(path, name)}: unknown key; {_nearest_key(name, data, fields, path)}")
    values: dict[str, Any] = {}
    for name, f in fields.items():
        key = _join(path, name)
        kind = Optional[hints[name]] if f.default is None else hints[name]  # noqa: UP045, of any type
        if name in data:
            try:
                values[name] = _fit(data[name], kind, key, f.metadata)
            except _InvalidValue as e:
                errors += e.errors or [_unexpected(key, data[name], kind, f.metadata)]
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            errors.append(f"{key}: missing; give it a value")
    if len(errors) > before:
        return None
    try:
        return (make or cls)(**values)
    except ValueError as e:
        errors.append(with_key(path, e))
        return None


def _unexpected(key: str, value: Any, kind: Any, limits: Mapping[str, Any]) -> str:
    wanted = f"expected {describe(kind, limits)}"
    remedy = instead_of_value(key, value)
    if (
        remedy is None
        and wanted.startswith("expected a list, each item text")
        and re.fullmatch(r"[\w./-]+", str(value))
    ):
        remedy = f"use {key}=[{value}]"
    return f"{format_override(key, value)}: {wanted}" + (f"; {remedy}" if remedy else "")


def with_key(path: str, error: Exception) -> str:
    """Return the text of ``error``, preceded by the key ``path`` unless it already begins with it."""
    text = str(error)
    return text if not path or text.startswith((f"{path}.", f"{path}:", f"{path}=")) else f"{path}: {text}"


_hints = functools.cache(get_type_hints)


def type_hints(cls: type[Any], path: str) -> Mapping[str, Any]:
    """Return the types of the fields of ``cls``, which has the key ``path``.

    Raises:
        ConfigError: one is unknown.
    """
    try:
        return _hints(cls)  # type: ignore[arg-type]
    except NameError as e:
        reason = f"{e}; import it outside `if TYPE_CHECKING:`"
    except (TypeError, SyntaxError, AttributeError) as e:
        reason = str(e)
    raise ConfigError([f"{path}: a field type of {cls.__name__} is unknown: {reason}"])


def _nearest_key(name: str, data: Mapping[str, Any], fields: Iterable[str], path: str) -> str:
    """Suggest the closest key of this section, or the same key in a subsection: ``train.steps`` for ``steps``."""
    if "." in name:  # of a file; the command line has no such keys
        section, _, key = name.partition(".")
        return f"in a file, write `{section}: {{{key}: ...}}`"
    value = data[name]
    inside = dict(value) if isinstance(value, Mapping) else {}
    joined = {f"{name}_{word}": given for word, given in inside.items()}
    for word, given in (*joined.items(), *inside.items(), (name, value)):
        below = [_join(path, f"{section}.{word}") for section in fields if word in _names(data.get(section))]
        if below:
            remedy = next(filter(None, (instead_of_value(key, given) for key in below)), None)
            if remedy is not None or word == name:
                return remedy or f"did you mean {' or '.join(below)}?"
        elif (remedy := instead_of_override(str(word), given)) is not None:
            return remedy
    return did_you_mean(name, fields, prefix=_join(path, ""))


def _names(section: Any) -> Iterable[str]:
    if dataclasses.is_dataclass(section):
        return [f.name for f in dataclasses.fields(section)]
    return section if isinstance(section, Mapping) else ()


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _fit(value: Any, kind: Any, key: str, limits: Mapping[str, Any]) -> Any:
    """Return ``value`` as ``kind``.

    Raises:
        _InvalidValue: the value has another type or is outside the limits.
    """
    origin, args = get_origin(kind), get_args(kind)
    if limits.get("epochs") and isinstance(value, str) and (epochs := Epochs.read(value)) is not None:
        return epochs
    if origin in (Union, types.UnionType):
        return _fit_one_of(args, value, key, limits)
    if origin is Literal:
        return _fit_literal(value, args)
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and not isinstance(value, kind):
        return _fit_enum(value, kind)
    if isinstance(value, Typed) and kind in _TEXTS:
        if value.value is None:
            raise _InvalidValue(
                f"{format_override(key, value)}: expected {describe(kind, limits)}; the word null is typed in quotes"
            )
        return kind(str(value))
    if kind is Any or kind in (*_SEQUENCES, *_MAPPINGS) or isinstance(value, Typed):
        value = plain(value)
    if kind is Any or (isinstance(kind, type) and kind is not int and isinstance(value, kind)):
        return _within(value, key, limits)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _fit_dataclass(value, kind, key)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if kind in (int, float) and isinstance(value, (int, kind)) and not isinstance(value, bool):
        return kind(_within(value, key, limits))
    if kind in _TEXTS and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return kind(str(value))
    if (origin or kind) in _SEQUENCES:
        return _fit_sequence(value, origin or kind, args, key)
    if (origin or kind) in _MAPPINGS and isinstance(value, Mapping):
        key_type, value_type = args or (Any, Any)
        return {_fit(k, key_type, key, {}): _fit(v, value_type, _join(key, k), {}) for k, v in value.items()}
    raise _InvalidValue


def _fit_one_of(kinds: tuple[Any, ...], value: Any, key: str, limits: Mapping[str, Any]) -> Any:
    errors: list[str] = []
    given = type(plain(value))
    # Try the exact type first, and text last, so that 3 stays a number in `str | int` and in `str | float`.
    for kind in sorted(kinds, key=lambda k: (k is not given, k in _TEXTS)):
        try:
            return _fit(value, kind, key, limits)
        except _InvalidValue as e:
            errors += e.errors
    raise _InvalidValue(*errors)


def _fit_dataclass(value: Any, kind: type[Any], key: str) -> Any:
    if not isinstance(value, Mapping):
        raise _InvalidValue
    errors: list[str] = []
    built = build(kind, value, key, errors)
    if built is None:
        raise _InvalidValue(*errors)
    return built


def _fit_literal(value: Any, words: tuple[Any, ...]) -> Any:
    for word in words:
        if any(type(word) is type(meant) and word == meant for meant in _meanings(value)):
            return word
    raise _InvalidValue


def _fit_enum(value: Any, kind: type[enum.Enum]) -> enum.Enum:
    for meant in _meanings(value):
        if isinstance(meant, str) and meant in kind.__members__:
            return kind[meant]
    for member in kind:
        if any(type(member.value) is type(meant) and member.value == meant for meant in _meanings(value)):
            return member
    raise _InvalidValue


def _meanings(value: Any) -> tuple[Any, ...]:
    """Return what a value may stand for where single words are known: its text, and what that text means."""
    if isinstance(value, Typed):
        return str(value), value.value
    return (value, str(value)) if isinstance(value, (int, float)) and not isinstance(value, bool) else (value,)


def _fit_sequence(value: Any, kind: Any, args: tuple[Any, ...], key: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _InvalidValue
    kinds = list(args) if kind is tuple and args and args[-1] is not ... else [args[0] if args else Any] * len(value)
    if len(kinds) != len(value):
        raise _InvalidValue
    items = [_fit(v, k, f"{key}[{i}]", {}) for i, (v, k) in enumerate(zip(value, kinds, strict=True))]
    return items if kind is list else tuple(items)


def _within(value: Any, key: str, limits: Mapping[str, Any]) -> Any:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return value
    if not math.isfinite(value):
        raise _InvalidValue
    minimum, above, maximum, below = (limits.get(name) for name in ("minimum", "above", "maximum", "below"))
    if minimum is not None and value < minimum:
        raise _InvalidValue(f"{format_override(key, value)}: must be at least {minimum}")
    if above is not None and value <= above:
        raise _InvalidValue(f"{format_override(key, value)}: must be greater than {above}")
    if maximum is not None and value > maximum:
        raise _InvalidValue(f"{format_override(key, value)}: must be at most {maximum}")
    if below is not None and value >= below:
        raise _InvalidValue(f"{format_override(key, value)}: must be less than {below}")
    return value


def describe(kind: Any, limits: Mapping[str, Any]) -> str:
    """Return in words what a field of this type takes."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _one_of(describe(a, limits) for a in args)
    if origin is Literal:
        return _one_of(to_cli(a) for a in args)
    if kind in (int, float):
        number = f"a number{_bounds(limits)}"
        if kind is int:
            least = limits.get("minimum")
            number = "a whole number" if least is None else f"a whole number of at least {least}"
        return f"{number}, or epochs, as in '1 epoch'" if limits.get("epochs") else number
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _one_of(kind.__members__)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return f"a section with the keys {', '.join(_names(kind))}"
    if (origin or kind) in _SEQUENCES:
        if origin is tuple and args[-1] is not ...:
            return f"[{', '.join(describe(a, {}) for a in args)}]"
        return f"a list, each item {describe(args[0], {})}" if args else "a list"
    if (origin or kind) in _MAPPINGS:
        return "a mapping"
    names = {bool: "true or false", str: "text", Path: "a path"}
    if kind is type(None):
        return "null"
    return names.get(kind, f"a {getattr(kind, '__name__', kind)}")


def _bounds(limits: Mapping[str, Any]) -> str:
    words = {"minimum": "of at least", "above": "above", "maximum": "of at most", "below": "below"}
    found = [f"{text} {limits[name]:g}" for name, text in words.items() if limits.get(name) is not None]
    return f" {' and '.join(found)}" if found else ""


def _one_of(alternatives: Iterable[str]) -> str:
    """Join as in ``a, b or c``."""
    *first, last = alternatives
    return f"{', '.join(first)} or {last}" if first else last
