"""The arguments of :func:`orchestrator.run`, as overrides of the configuration and a job, and how large they may be."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from orchestrator.config.build import ConfigError
from orchestrator.config.overrides import key_text, quote_text
from orchestrator.job import Job

GivenJob = Job | type[Job]
"""A job as an object, not as the name of a class: an instance, or a class to be built from the keys ``job.<field>``."""
MAX_VALUES = 2000
"""Enough for the names of ImageNet's classes; to write so many takes half a second."""
MAX_CHARACTERS = 2**17


@dataclass(frozen=True)
class Arguments:
    """``overrides`` as typed on the command line, and the job that was passed as an object; None if there is none."""

    overrides: tuple[str, ...]
    job: GivenJob | None


def read_arguments(positional: Sequence[object], keywords: Mapping[str, object]) -> Arguments:
    """Return the overrides and the job among the arguments of :func:`orchestrator.run`.

    Raises:
        ConfigError: an argument has an unsupported type, or several jobs were given.
    """
    errors: list[str] = []
    overrides: list[str] = []
    jobs: list[GivenJob] = []
    for part in [*_parts(positional), keywords]:
        if isinstance(part, str):
            overrides.append(part)
        elif _is_job(part):
            jobs.append(part)
        elif isinstance(part, Mapping):
            if large := too_large(_job_fields(part)):
                errors += large
                continue
            for key, value in _flat(part):
                if key == "job" and _is_job(value):
                    jobs.append(value)
                else:
                    overrides += _override(key, value, errors)
        else:
            errors.append(
                f"orchestrator.run: cannot use {_described(part)}; give 'key=value' strings, mappings, "
                "key=value arguments, and a Job or its class"
            )
    if len(jobs) > 1:
        errors.append(f"orchestrator.run: {len(jobs)} jobs were given; a run trains one")
    if errors:
        raise ConfigError(errors)
    return Arguments(tuple(overrides), jobs[0] if jobs else None)


def _is_job(value: object) -> TypeGuard[GivenJob]:
    return isinstance(value, Job) or (isinstance(value, type) and issubclass(value, Job))


def _job_fields(part: Mapping[Any, Any]) -> dict[str, Any]:
    nested = part.get("job")
    dotted = {key[4:]: value for key, value in part.items() if isinstance(key, str) and key.startswith("job.")}
    return {**(nested if isinstance(nested, Mapping) else {}), **dotted}


def _parts(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            yield from _parts(value)
        else:
            yield value


def _flat(mapping: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values. The name in a whole strategy section, as ``config.yaml`` has it, is its group."""
    for name, value in mapping.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and ("." not in key or all(map(_is_word, value))):
            yield from _flat(value, f"{key}.")
        else:
            yield ("strategy" if key == "strategy.name" else key), value


def _is_word(name: object) -> bool:
    """Return whether ``name`` can be a part of a dotted key, where it is text; 1 and 1.10 cannot."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z_][\w-]*", name, re.ASCII) is not None


def _override(key: str, value: object, errors: list[str]) -> list[str]:
    if not re.fullmatch(r"\w[\w-]*(\.\w[\w-]*)*", key):
        errors.append(f"{key!r}: expected a key like train.steps")
        return []
    try:
        return [f"{key}={_hydra_text(value)}"]
    except TypeError as e:
        hint = "; or pass an instance of the job that has it" if key.startswith("job.") else ""
        errors.append(f"{key}: cannot be {e}; give text, a number, True, False, None, a list or a mapping{hint}")
        return []


def _hydra_text(value: Any) -> str:
    """Return the value as Hydra reads it back.

    Raises:
        TypeError: there is no such text; the message describes the value.
    """
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, enum.Enum):
        return quote_text(value.name)
    if isinstance(value, (str, Path)):
        return quote_text(str(value))
    if isinstance(value, (int, float)):
        return (
            repr(value)
            if type(value) in (int, float)
            else _hydra_text(int(value) if isinstance(value, int) else float(value))
        )
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):  # a scalar of NumPy or torch
        return _hydra_text(value.item())
    if isinstance(value, Mapping):
        names = list(map(key_text, value))
        if None in names:
            raise TypeError("a mapping with keys other than words and numbers")
        return "{" + ",".join(f"{n}:{_hydra_text(item)}" for n, item in zip(names, value.values(), strict=True)) + "}"
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return "[" + ",".join(map(_hydra_text, value)) + "]"
    raise TypeError(_described(value))


def _described(value: object) -> str:
    """Return the kind of a value. The value itself may be long, or a secret."""
    return (
        f"the class {value.__qualname__}" if isinstance(value, type) else f"a value of type {type(value).__qualname__}"
    )


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
