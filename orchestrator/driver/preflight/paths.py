"""The paths of a run, made absolute, and the checks of the paths and the environment."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from orchestrator.config.schema import Config
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_search import submitted_base_dir
from orchestrator.storage.remote import StorageError, is_url
from orchestrator.tracking.uri import absolute_uri, validate_uri

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
    tracking = config.tracking
    if tracking.uri is not None:
        tracking = dataclasses.replace(tracking, uri=absolute_uri(tracking.uri, base_dir()))
    output_dir, storage = config.output_dir, config.storage
    if not is_url(output_dir):
        output_dir = str((base_dir() / Path(output_dir).expanduser()).resolve())
    if storage.staging_dir is not None:
        storage = dataclasses.replace(storage, staging_dir=str(base_dir() / Path(storage.staging_dir).expanduser()))
    return dataclasses.replace(config, output_dir=output_dir, tracking=tracking, storage=storage)


def output_dir(config: Config) -> OutputDir:
    """Return where the runs of ``config`` are; its paths are absolute."""
    storage = config.storage
    return OutputDir.of(config.output_dir, staging_dir=storage.staging_dir, timeout_s=storage.timeout_s)


def environment_errors(config: Config) -> list[str]:
    """Return what is wrong with the tracking URI and the output directory."""
    errors = []
    if config.tracking.uri is not None and (error := validate_uri(config.tracking.uri)):
        errors.append(error)
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
