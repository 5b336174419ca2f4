"""The configuration of a run: its paths, made absolute and checked, its environment, and how it is recorded."""

from __future__ import annotations

import dataclasses
import enum
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.config.recorded_config import to_dict
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.driver.process.uploads import tracking_keys
from orchestrator.job import Job
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_search import submitted_base_dir
from orchestrator.storage.remote import StorageError, is_url
from orchestrator.strategies import registry

PATH_KEYS = ("output_dir", "tracking.uri", "resume", "evaluate")


def base_dir() -> Path:
    """Return the directory that relative paths start from.

    This is the working directory, or ``~/orchestrator`` if Ray unpacked the working directory for a submitted job and
    will delete it afterwards.
    """
    here = Path.cwd()
    return submitted_base_dir() if "runtime_resources" in here.parts else here


def absolute_paths(config: Config) -> Config:
    """Return ``config`` with absolute paths in ``output_dir``, unless that is a URL, and in what else is a path."""
    keys = tracking_keys().absolute(config.tracking, base_dir())
    output_dir, storage = config.output_dir, config.storage
    if not is_url(output_dir):
        output_dir = str((base_dir() / Path(output_dir).expanduser()).resolve())
    if storage.staging_dir is not None:
        storage = dataclasses.replace(storage, staging_dir=str(base_dir() / Path(storage.staging_dir).expanduser()))
    return dataclasses.replace(config, output_dir=output_dir, tracking=keys, storage=storage)


def output_dir(config: Config) -> OutputDir:
    """Return where the runs of ``config`` are; its paths are absolute."""
    storage = config.storage
    return OutputDir.of(config.output_dir, staging_dir=storage.staging_dir, timeout_s=storage.timeout_s)


def environment_errors(config: Config) -> list[str]:
    """Return what is wrong with the keys of tracking, and with the output directory."""
    return [*tracking_keys().errors(config.tracking, base_dir()), *output_errors(config)]


def tracking_note(config: Config) -> list[str]:
    """Return remarks on what the environment decides about the tracking, and on what it does not decide."""
    return tracking_keys().notes(config.tracking, base_dir())


def output_errors(config: Config) -> list[str]:
    """Return what is wrong with the output directory."""
    errors = []
    output = output_dir(config)
    try:
        if output.remote is not None:
            output.prepare()
            output.remote.check_writable()
        existing = next(p for p in (output.path, *output.path.parents) if p.exists())
        tempfile.TemporaryDirectory(prefix=".probe-", dir=existing).cleanup()
    except OSError as e:
        errors.append(unwritable(config, e))
    return errors


def unwritable(config: Config, error: OSError) -> str:
    """Return the error for a directory of runs that cannot be written."""
    if isinstance(error, StorageError):
        return str(error)
    return f"output_dir={config.output_dir}: cannot be written ({error.strerror or error}); choose another"


def recorded_config(config: Config, job: Job, redactor: Redactor) -> dict[str, Any]:
    """Return the configuration with the fields of the job, secrets masked."""
    masked: dict[str, Any] = redactor.data(
        {**to_dict(config), "job": {"_target_": config.job.target, **plain_fields(job)}}
    )
    return masked


def params_of(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters for MLflow, by dotted key: all values of a recorded configuration except paths.

    A script has none of the sections that its own code replaces.
    """
    name = (recorded.get("strategy") or {}).get("name")
    unread = getattr(registry.config_class(name), "unread", ()) if name in registry.NAMES else ()
    left_out = (*unread, "start_from") if unread else ()
    return {
        key: value
        for key, value in _flatten(recorded).items()
        if key not in PATH_KEYS
        and not key.startswith(left_out)
        and not (isinstance(value, str) and value.startswith(("/", "~")))
    }


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
    if without_text or callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return str(value)


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat
