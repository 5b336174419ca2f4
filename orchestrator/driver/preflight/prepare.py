"""Prepare a run on the driver, without Ray: resume point, run directory, records."""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import platform
import re
import shlex
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from orchestrator.compat import deferred_dynamo
from orchestrator.config.build import ConfigError
from orchestrator.config.compose import to_dict, to_yaml
from orchestrator.config.overrides import masked
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.config.text import did_you_mean
from orchestrator.job import Job, has_training_step
from orchestrator.model.meta import on_meta_device
from orchestrator.planning.plan import Plan
from orchestrator.records.output_dir import OutputDir, fetch, refresh, split_run, take_over
from orchestrator.records.process import this_process
from orchestrator.records.run_dir import RunDir
from orchestrator.state.checkpoint import CheckpointError, read_manifest
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.joint import label_of
from orchestrator.state.mismatch import mismatches
from orchestrator.storage.remote import StorageError, is_url
from orchestrator.strategies.training_step import joined, optimizers_of
from orchestrator.tracking.uri import absolute_uri, validate_uri

VERSIONED = ("torch", "ray", "mlflow", "hydra-core")
PATH_KEYS = ("output_dir", "tracking.uri", "resume")
_SHAPES_CURVE = re.compile(r"seed|job\..*|train\.(global_batch_size|clip_norm|precision|on_nonfinite)")


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The run to continue, and the checkpoint and step that it continues from. ``driver``: who drove it last."""

    run_dir: RunDir
    checkpoint: Path
    step: int
    driver: Mapping[str, Any]


def base_dir() -> Path:
    """Return the directory that relative paths start from.

    This is the working directory, or ``~/orchestrator`` if Ray unpacked the working directory for a submitted job and
    will delete it afterwards.
    """
    here = Path.cwd()
    return Path.home() / "orchestrator" if "runtime_resources" in here.parts else here


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
        errors.append(_unwritable(config, e))
    return errors


def find_resume(config: Config, job: Job | None, *, warnings: list[str], redactor: Redactor) -> Resume | None:
    """Find the run that ``resume`` asks for.

    Args:
        config: with absolute paths.
        job: to compare its model with the checkpoint; None if it has errors itself.
        warnings: receives what the user should know, such as damaged checkpoints and changed settings.
        redactor: masks secrets in settings, as it did in the record of the run.

    Returns:
        None to start a new run.

    Raises:
        ConfigError: there is no such run, it is still running, it is damaged, its model differs, or the store that has
            it cannot be used.
    """
    if config.resume == "never":
        return None
    try:
        if config.resume == "auto":
            run_dir = _unfinished_run(config, output_dir(config), warnings)
            if run_dir is None:
                return None
        else:
            run_dir = _named_run(config)
        _refuse_if_running(config, run_dir)
        driver = run_dir.read_record().get("driver", {})
        damaged: list[CheckpointError] = []
        checkpoint = CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints).find_newest(damaged.append)
        fetch(run_dir)
    except StorageError as e:
        raise ConfigError([str(e)]) from e
    except ConfigError:
        raise
    except ValueError as e:
        raise ConfigError([f"resume={config.resume}: {e}"]) from e
    warnings.extend(f"checkpoint skipped: {e}" for e in damaged)
    if checkpoint is None:
        why = "; ".join(str(e) for e in damaged) or "it has no checkpoint"
        raise ConfigError([f"resume={config.resume}: {why}; resume=never starts a new run"])
    manifest = read_manifest(checkpoint)
    step = int(manifest["step"])
    errors = [] if job is None else _job_errors(job, checkpoint, manifest["meta"])
    errors = [f"resume={config.resume}: {error}" for error in errors]
    if step >= config.train.steps:
        errors.append(f"train.steps={config.train.steps}: the run to resume already has {step} steps; raise it")
    if errors:
        raise ConfigError(errors)
    if job is not None:
        warnings.extend(_changes(run_dir.read_record().get("params", {}), _params(_resolved(config, job, redactor))))
    return Resume(run_dir=run_dir, checkpoint=checkpoint, step=step, driver=driver)


def open_run(
    config: Config,
    job: Job,
    plan: Plan,
    resume: Resume | None,
    *,
    command: str,
    sweep: Mapping[str, str] | None,
    redactor: Redactor,
) -> tuple[RunDir, str]:
    """Create or reopen the run directory and write its records.

    If several processes resume a run at once, or start one of this name with ``resume=auto``, the first one succeeds.

    Args:
        config: with absolute paths.
        job: its fields are part of the recorded configuration.
        plan: how the run begins.
        resume: the run to continue; None for a new one.
        command: the command line of the run.
        sweep: the id and name of the sweep that the run belongs to; None if it belongs to none.
        redactor: masks secrets in everything that is written.

    Returns:
        The run directory and the uid of the run.

    Raises:
        ConfigError: the directory cannot be written; or another process drives the run, and nothing has been written.
    """
    resolved = _resolved(config, job, redactor)
    tracking = resolved["tracking"]
    record = {
        "name": plan.run_name,
        "state": "running",
        "driver": this_process(),
        "command": command,
        "strategy": plan.strategy,
        "job": plan.job,
        "plan": {**dataclasses.asdict(plan), "world_size": plan.world_size},
        "params": _params(resolved),
        "tags": _tags(plan),
        "tracking": {k: tracking[k] for k in ("uri", "experiment", "request_timeout_s", "flush_timeout_s")},
        "sweep": sweep,
    }
    output = output_dir(config)
    if resume is not None and resume.run_dir.remote is not None:
        output = OutputDir.containing(resume.run_dir)  # its URL may be another one than output_dir
    try:
        output.prepare()
        with output.locked():
            _refuse_if_taken(config, resume)
            run_dir = resume.run_dir if resume else output.create(plan.run_name)
            run_dir.reserve_space()
            run_dir.config_file.write_text(to_yaml(resolved))
            uid = str(run_dir.read_record().get("uid") or uuid.uuid4().hex)
            started = {"uid": uid, "started": time.time(), "location": run_dir.location}
            run_dir.update_record(**redactor.data({**record, **started}))
            take_over(run_dir)
    except OSError as e:
        raise ConfigError([_unwritable(config, e)]) from e
    return run_dir, uid


def _refuse_if_taken(config: Config, resume: Resume | None) -> None:
    """Refuse the run if another process has taken it since :func:`find_resume`."""
    if resume is not None:
        refresh(resume.run_dir)
        _refuse_if_running(config, resume.run_dir)
        if resume.run_dir.read_record().get("driver", {}) != resume.driver:
            raise ConfigError(
                [
                    f"resume={config.resume}: another process has continued {resume.run_dir.location}; start the "
                    "command again to continue from its last checkpoint"
                ]
            )
    elif config.resume == "auto":
        for run_dir in _unfinished_runs(output_dir(config), config.run_name, warnings=[]):
            _refuse_if_running(config, run_dir)


def _refuse_if_running(config: Config, run_dir: RunDir) -> None:
    driver = run_dir.driver_if_running()
    if driver is not None:
        raise ConfigError(
            [
                f"resume={config.resume}: {run_dir.location} is still running (pid {driver.get('pid')} on "
                f"{driver.get('host')}); stop it first, or start another with resume=never"
            ]
        )


def _unwritable(config: Config, error: OSError) -> str:
    if isinstance(error, StorageError):
        return str(error)
    return f"output_dir={config.output_dir}: cannot be written ({error.strerror or error}); choose another"


def _unfinished_run(config: Config, output: OutputDir, warnings: list[str]) -> RunDir | None:
    """Return the newest unfinished run of this name that has a checkpoint, None to start a new run.

    Raises:
        ConfigError: that run, or a newer one, is still running.
    """
    without: list[str] = []
    for run_dir in _unfinished_runs(output, config.run_name, warnings):
        _refuse_if_running(config, run_dir)
        if CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints).list():
            warnings.extend(f"resume=auto: {path} has no checkpoint; an older run is continued" for path in without)
            return run_dir
        without.append(run_dir.location)
    if without:
        warnings.append(f"resume=auto: {without[0]} has no checkpoint yet; this is a new run")
    else:
        warnings.append(f"resume=auto: no unfinished run is named {config.run_name}; this is a new one")
    return None


def _unfinished_runs(output: OutputDir, name: str, warnings: list[str]) -> Iterator[RunDir]:
    """Yield the unfinished runs of this name, the newest first."""
    for run_dir in output.runs():
        try:
            record = run_dir.read_record()
        except ValueError as e:
            warnings.append(f"run skipped: {e}")
            continue
        if record.get("name") == name and record.get("state") != "finished":
            yield run_dir


def _named_run(config: Config) -> RunDir:
    text, output = config.resume, output_dir(config)
    if is_url(text):
        storage = config.storage
        above, name = split_run(text, staging_dir=storage.staging_dir, timeout_s=storage.timeout_s)
        if (found := above.find(name)) is not None:
            return found
        raise ConfigError([f"resume={text}: no run directory there; its run.json is missing"])
    places = [Path(text).expanduser().absolute(), *([output.path / text] if output.remote is None else [])]
    for path in places:
        if (path / "run.json").is_file():
            return RunDir(path.resolve())
    names = {f"{r.path.parent.name}/{r.path.name}": r for r in output.runs()}
    matches = [r for name, r in names.items() if text in (name, r.path.name)]
    if len(matches) == 1:
        return matches[0]
    looked = " or ".join(dict.fromkeys(str(path / "run.json") for path in places))
    known = did_you_mean(text, list(names)[:8]) if names else f"there are no runs below {output} (output_dir)"
    if len(matches) > 1:
        known = f"several runs have this name: {', '.join(name for name, run in names.items() if run in matches)}"
    raise ConfigError([f"resume={text}: no run directory there; {known} (looked for {looked})"])


def _job_errors(job: Job, checkpoint: Path, meta: Mapping[str, Any]) -> list[str]:
    """Return how the job's model and optimizer differ from those of the checkpoint, without allocating either.

    Empty if the model cannot be built without memory: the workers then find out when they restore it.
    """
    deferred_dynamo.install()
    model = on_meta_device(job.model)
    if model is None:
        return []
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in model.state_dict().items()}
    with safe_open(checkpoint / "model.safetensors", framework="pt", device="cpu") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    errors = [f"of another model: {line}" for line in mismatches(shapes, saved)]
    made = joined(optimizers_of(job, model)) if has_training_step(job) else job.optimizer(model.parameters())
    optimizer = label_of(made)
    if optimizer != meta["optimizer"]:
        errors.append(f"of another optimizer: {meta['optimizer']}, the job has {optimizer}")
    return errors


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return which settings have changed that change the loss curve."""
    changed = [
        f"{key} was {before[key]} in this run so far; it is {value} from now on"
        for key, value in now.items()
        if key in before and before[key] != value and _SHAPES_CURVE.fullmatch(key)
    ]
    if any(change.startswith("job.") for change in changed):
        changed.append("the optimizer keeps its settings from the checkpoint, including the learning rate")
    return changed


def command(overrides: Sequence[str], redactor: Redactor, *, job: str = "") -> str:
    """Return the command of a run, with secrets masked and only the last of several ``resume=``.

    This is a command line. A ``job`` that was passed as an object has none, so that a call in Python starts it.
    """
    *_, last = [None, *(o for o in overrides if o.startswith("resume="))]
    kept = [masked(o, redactor) for o in overrides if o == last or not o.startswith("resume=")]
    if job:
        return f"orchestrator.run({', '.join([redactor.text(job), *map(repr, kept)])})"
    return shlex.join(["python", "-m", "orchestrator.launch", *kept])


def _resolved(config: Config, job: Job, redactor: Redactor) -> dict[str, Any]:
    resolved: dict[str, Any] = redactor.data({**to_dict(config), "job": _job_dict(config, job)})
    return resolved


def _params(resolved: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in _flatten(resolved).items() if _is_param(k, v)}


def _job_dict(config: Config, job: Job) -> dict[str, Any]:
    return {"_target_": config.job.target, **plain_fields(job)}


def plain_fields(job: Job) -> dict[str, Any]:
    """Return the fields of the job as values that YAML and JSON have."""
    fields: dict[str, Any] = _plain(job)
    return fields


def _plain(value: Any) -> Any:
    """Convert a value to types that YAML and JSON have; the fields of a user's job may be of any type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
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


def _tags(plan: Plan) -> dict[str, str]:
    tags = {
        "strategy": plan.strategy,
        "job": plan.job,
        "world_size": str(plan.world_size),
        "device": plan.device,
        "backend": "nccl" if plan.device == "cuda" else "gloo",
        "generation": "1",
        "version.python": platform.python_version(),
    }
    for package in VERSIONED:
        tags[f"version.{package}"] = importlib.metadata.version(package)
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
        tags["git_commit"] = commit.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    return tags
