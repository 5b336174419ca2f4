"""The configuration as it is recorded, and as parameters for MLflow."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from orchestrator.config.compose import to_dict
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.driver.preflight.paths import PATH_KEYS
from orchestrator.job import Job


def recorded_config(config: Config, job: Job, redactor: Redactor) -> dict[str, Any]:
    """Return the configuration with the fields of the job, secrets masked."""
    masked: dict[str, Any] = redactor.data(
        {**to_dict(config), "job": {"_target_": config.job.target, **plain_fields(job)}}
    )
    return masked


def params_of(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters for MLflow, by dotted key: all values of a recorded configuration except paths."""
    return {k: v for k, v in _flatten(recorded).items() if _is_param(k, v)}


def plain_fields(job: Job) -> dict[str, Any]:
    """Return the fields of the job as values that YAML and JSON have."""
    fields: dict[str, Any] = _plain(job)
    return fields


def _plain(value: Any) -> Any:
    """Convert a value to types that YAML and JSON have; the fields of a user's job may be of any type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k if isinstance(k, (int, float)) else str(_plain(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    # Text with an address in memory would differ in every process.
    without_text = getattr(type(value), "__repr__", None) is object.__repr__
    return _name(value) if without_text or callable(value) else str(value)


def _name(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def _is_param(key: str, value: Any) -> bool:
    return key not in PATH_KEYS and not (isinstance(value, str) and value.startswith(("/", "~")))
