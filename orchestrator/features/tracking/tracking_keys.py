"""What the core asks of the keys of tracking: whether they can be used, and what follows from them."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

from orchestrator.config.operation import SINKS, TENSORBOARD, TrackingConfig
from orchestrator.driver.process.origin import Origin
from orchestrator.features.tracking import wandb
from orchestrator.features.tracking.sinks import folder_of, load_sink
from orchestrator.features.tracking.uri import absolute_uri, check_tracking, page_command, redact_uri, validate_uri
from orchestrator.protocol.node_report import Finding
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import RunDir

URI_VARIABLE = "MLFLOW_TRACKING_URI"
_EXPERIMENT_VARIABLE = "MLFLOW_EXPERIMENT_NAME"
_IGNORED = {
    "MLFLOW_EXPERIMENT_ID": "set tracking.experiment to the name of the experiment",
    "MLFLOW_RUN_ID": "each run makes its own; resume=<run> goes on with one",
    "MLFLOW_RUN_NAME": "set name",
    "MLFLOW_PARENT_RUN_ID": "the runs of a sweep have the tag sweep_id",
    "MLFLOW_TAGS": "add tags with MlflowClient.set_tag",
    "MLFLOW_REGISTRY_URI": "models are logged at tracking.uri",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "set tracking.request_timeout_s",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "uploads are repeated until they succeed",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "set tracking.system_metrics_every_s",
    "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "set tracking.system_metrics_every_s",
}
"""Variables that MLflow knows and a run does not follow, with what to do in their place."""


def absolute(tracking: TrackingConfig, base: Path) -> TrackingConfig:
    """See :meth:`TrackingKeys.absolute`."""
    return tracking if tracking.uri is None else dataclasses.replace(tracking, uri=absolute_uri(tracking.uri, base))


def errors(tracking: TrackingConfig, base: Path) -> list[str]:
    """See :meth:`TrackingKeys.errors`."""
    found = _sink_errors(tracking)
    if tracking.uri is None or (error := validate_uri(tracking.uri)) is None:
        return found
    if URI_VARIABLE in variables(tracking, base):
        error = f"{error.replace('tracking.uri', URI_VARIABLE, 1)}, or set tracking.uri"
    return [error, *found]


def _sink_errors(tracking: TrackingConfig) -> list[str]:
    errors = []
    named = {"tracking.tensorboard": "tensorboard"} if tracking.tensorboard else {}
    named |= {f"tracking.sinks=[{sink}]": sink for sink in tracking.sinks if sink in SINKS}
    for key, package in named.items():
        if importlib.util.find_spec(package) is None:
            errors.append(f"{key}: needs {package}; install it with: pip install {package}")
        elif package == "wandb" and (problem := wandb.why_unusable()) is not None:
            errors.append(f"{key}: {problem}")
    for path in tracking.sinks:
        try:
            if path not in SINKS:
                load_sink(path)
        except ValueError as e:
            errors.append(str(e))
    return errors


def variables(tracking: TrackingConfig, base: Path) -> dict[str, str]:
    """See :meth:`TrackingKeys.variables`."""
    found = {}
    given = {name: value for name in (URI_VARIABLE, _EXPERIMENT_VARIABLE) if (value := os.environ.get(name))}
    if tracking.uri is not None and absolute_uri(given.get(URI_VARIABLE, ""), base) == tracking.uri:
        found[URI_VARIABLE] = redact_uri(tracking.uri)
    if tracking.uri is not None and given.get(_EXPERIMENT_VARIABLE) == tracking.experiment:
        found[_EXPERIMENT_VARIABLE] = tracking.experiment
    return found


def notes(tracking: TrackingConfig, base: Path) -> list[str]:
    """See :meth:`TrackingKeys.notes`."""
    found = variables(tracking, base)
    notes = [f"MLflow: {', '.join(f'{name}={value}' for name, value in found.items())}"] if found else []
    if tracking.uri is not None:
        notes += [f"{name} is ignored: {remedy}" for name, remedy in _IGNORED.items() if os.environ.get(name)]
    return notes


def findings(tracking: TrackingConfig) -> Iterator[Finding]:
    """See :meth:`TrackingKeys.findings`."""
    yield check_tracking(tracking.uri, timeout_s=tracking.request_timeout_s)


def sync_commands(run_dir: RunDir) -> list[str]:
    """See :meth:`TrackingKeys.sync_commands`."""
    command = wandb.sync_command(run_dir.sinks) if run_dir.remote is None else None
    return [] if command is None else [command]


def page_commands(tracking: TrackingConfig, origin: Origin) -> list[str]:
    """See :meth:`TrackingKeys.page_commands`."""
    if tracking.uri is None or not tracking.uri.startswith("sqlite"):
        return []
    where = f"on {socket.gethostname()}: " if origin.remote else ""
    return [f"{where}{page_command(tracking.uri)}"]


def event_file_commands(run_dir: RunDir, origin: Origin) -> list[str]:
    """See :meth:`TrackingKeys.event_file_commands`."""
    if origin.remote or not (run_dir.sinks / folder_of(TENSORBOARD)).is_dir():
        return []
    return [shlex.join(["tensorboard", "--logdir", str(OutputDir.containing(run_dir).path)])]
