"""The schema of the configuration as JSON Schema, with which an editor completes and checks the files of a user."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Optional, Union, get_args, get_origin, get_type_hints

from orchestrator.config.build import ConfigError, type_hints
from orchestrator.config.files import group_values
from orchestrator.config.recorded_config import to_dict
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.config.text import did_you_mean
from orchestrator.config.typed import Typed, plain
from orchestrator.job import Job

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_INTERPOLATION = {"type": "string", "pattern": r"\$\{"}
_TEXT = {"type": ["string", "number", "boolean"]}
"""A text field gets a number as it is written."""
_SIMPLE: Mapping[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: _TEXT,
    Path: _TEXT,
    type(None): {"type": "null"},
}
_LIMITS = {"minimum": "minimum", "above": "exclusiveMinimum", "maximum": "maximum", "below": "exclusiveMaximum"}


def json_schema(
    config: Config,
    strategies: Mapping[str, type[Any]],
    job: type[Job] | None,
    redactor: Redactor,
    section: str | None = None,
) -> dict[str, Any]:
    """Return the schema of a file with keys of all sections, or of one ``section``, such as ``strategy``.

    Args:
        config: its values are the defaults.
        strategies: the configuration class of each strategy, by name.
        job: the class whose fields ``job`` has; others are allowed too, as another file may choose another job.
        redactor: knows the secrets of the configuration.
        section: the section that the file has, without its name; None for all.

    Raises:
        ConfigError: there is no such section.
    """
    values = redactor.data(to_dict(config))
    root = _section(Config, values)
    root["properties"] |= {
        "strategy": {"anyOf": [_strategy(name, cls) for name, cls in strategies.items()]},
        "job": _job(job, config.job.fields, redactor),
        "hydra": {"type": "object", "description": "of Hydra's own keys, only hydra.sweeper.params"},
    }
    schema = root
    if section is not None:
        if section not in root["properties"]:
            raise ConfigError([f"{section}: no such section; {did_you_mean(section, root['properties'])}"])
        schema = root["properties"][section]
    for part in schema.get("anyOf", [schema]):
        part.setdefault("properties", {})["defaults"] = {
            "type": "array",
            "description": "files that are composed before or after this one (_self_), as in any program with Hydra",
        }
    return {"$schema": DIALECT, **schema}


def _section(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    properties = {}
    for field in dataclasses.fields(cls):
        if "meaning" in field.metadata:
            described = {"description": field.metadata["meaning"], "default": values[field.name]}
            properties[field.name] = _of_type(hints[field.name], field.metadata) | described
        elif dataclasses.is_dataclass(hints[field.name]):
            properties[field.name] = _section(hints[field.name], values[field.name])
    description = (cls.__doc__ or "").partition("\n")[0]
    return {"type": "object", "description": description, "properties": properties, "additionalProperties": False}


def _strategy(name: str, cls: type[Any]) -> dict[str, Any]:
    schema = _section(cls, group_values("strategy", name))
    schema["properties"]["name"] = {"const": name}
    return {**schema, "title": name}


def _job(cls: type[Job] | None, values: Mapping[str, Any], redactor: Redactor) -> dict[str, Any]:
    properties: dict[str, Any] = {"_target_": {"type": "string", "description": "package.module.Class of the job"}}
    for field in dataclasses.fields(cls) if cls is not None else ():
        if field.init:
            kind = type_hints(cls, "job")[field.name]  # type: ignore[arg-type]
            properties[field.name] = _of_type(Optional[kind] if field.default is None else kind, {})  # noqa: UP045
            given = values.get(field.name, field.default)
            default = str(given) if isinstance(given, Typed) and kind in (str, Path) else plain(given)
            default = default.name if isinstance(default, enum.Enum) else default
            if _is_plain(default) and redactor.data({field.name: default}) == {field.name: default}:
                properties[field.name]["default"] = default
    return {"type": "object", "properties": properties}


def _of_type(kind: Any, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the values that a field of this type takes, which may be interpolations."""
    schema = _exact(kind, limits)
    return {"anyOf": [*schema.get("anyOf", [schema]), _INTERPOLATION]} if schema else {}


def _exact(kind: Any, limits: Mapping[str, Any]) -> dict[str, Any]:
    origin, args = get_origin(kind) or kind, get_args(kind)
    if limits.get("epochs"):
        return {"anyOf": [_exact(kind, {**limits, "epochs": None}), {"type": "string", "pattern": "epochs?$"}]}
    if kind in _SIMPLE:
        bounds = {_LIMITS[name]: limits[name] for name in _LIMITS if limits.get(name) is not None}
        return _SIMPLE[kind] | (bounds if kind in (int, float) else {})
    if origin in (Union, types.UnionType):
        return {"anyOf": [_exact(arg, limits) for arg in args]}
    if origin is Literal:
        names = [arg.name if isinstance(arg, enum.Enum) else arg for arg in args]
        return {"enum": names} if all(map(_is_plain, names)) else {}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": list(kind.__members__)}
    if origin is tuple and args and args[-1] is not ...:
        return {"type": "array", "prefixItems": [_of_type(a, {}) for a in args], "minItems": len(args), "items": False}
    if origin in (list, tuple, collections.abc.Sequence):
        return {"type": "array", "items": _of_type(args[0], {}) if args else {}}
    if origin in (dict, collections.abc.Mapping):
        return {"type": "object", "additionalProperties": _of_type(args[1], {}) if args else {}}
    return {}  # nested dataclasses of a job, which are checked when it is built


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
