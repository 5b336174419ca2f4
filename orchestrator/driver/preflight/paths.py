"""The paths of a run, made absolute, and the checks of the paths and the environment."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import tempfile
from pathlib import Path

from orchestrator.config.schema import Config
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_search import submitted_base_dir
from orchestrator.storage.remote import StorageError, is_url
from orchestrator.tracking.sinks import load_sink
from orchestrator.tracking.uri import absolute_uri, redact_uri, validate_uri

URI_VARIABLE = "MLFLOW_TRACKING_URI"
_EXPERIMENT_VARIABLE = "MLFLOW_EXPERIMENT_NAME"
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
    """Return what is wrong with the tracking URI, the sinks and the output directory."""
    uri, errors = config.tracking.uri, [*sink_errors(config), *output_errors(config)]
    if uri is None or (error := validate_uri(uri)) is None:
        return errors
    if URI_VARIABLE in tracking_variables(config):
        error = f"{error.replace('tracking.uri', URI_VARIABLE, 1)}, or set tracking.uri"
    return [error, *errors]


def sink_errors(config: Config) -> list[str]:
    """Return what is wrong with the sinks."""
    errors = []
    if config.tracking.tensorboard and importlib.util.find_spec("tensorboard") is None:
        errors.append(
            "tracking.tensorboard: needs TensorBoard; install it with: pip install 'orchestrator[tensorboard]'"
        )
    for path in config.tracking.sinks:
        try:
            load_sink(path)
        except ValueError as e:
            errors.append(str(e))
    return errors


def tracking_variables(config: Config) -> dict[str, str]:
    """Return the environment variables of MLflow whose values ``config`` has, with absolute paths; masked."""
    tracking, found = config.tracking, {}
    given = {name: value for name in (URI_VARIABLE, _EXPERIMENT_VARIABLE) if (value := os.environ.get(name))}
    if tracking.uri is not None and absolute_uri(given.get(URI_VARIABLE, ""), base_dir()) == tracking.uri:
        found[URI_VARIABLE] = redact_uri(tracking.uri)
    if tracking.uri is not None and given.get(_EXPERIMENT_VARIABLE) == tracking.experiment:
        found[_EXPERIMENT_VARIABLE] = tracking.experiment
    return found


def tracking_note(config: Config) -> list[str]:
    """Return a remark on what the environment decides about the tracking; none if it decides nothing."""
    found = tracking_variables(config)
    return [f"MLflow: {', '.join(f'{name}={value}' for name, value in found.items())}"] if found else []


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
