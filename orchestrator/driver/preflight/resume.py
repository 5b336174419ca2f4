"""Find the run to resume, and refuse one that cannot be resumed."""

from __future__ import annotations

import contextlib
import itertools
import re
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.config.build import ConfigError
from orchestrator.config.recorded_config import why_no_best, why_no_checkpoint
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config, TrainConfig
from orchestrator.config.text import path_override
from orchestrator.driver.preflight.child_checks import Misfit, continuation_errors
from orchestrator.driver.preflight.named_runs import chooses_job, named_run, other_fields, other_job, readable
from orchestrator.driver.preflight.run_config import output_dir, params_of, recorded_config
from orchestrator.driver.process.origin import left_run
from orchestrator.job import Job
from orchestrator.records.output_dir import fetch, name_of, refresh
from orchestrator.records.run_dir import RunDir, split_checkpoint
from orchestrator.records.run_search import NEWEST, progress_of
from orchestrator.state.best import BEST, BestSoFar
from orchestrator.state.checkpoint import is_held, path_of, remove_staging
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.manifest import CheckpointError, read_manifest
from orchestrator.storage.remote import StorageError
from orchestrator.strategies import registry

PRECISION = "train.precision"
STEPS = "train.steps"
_OTHERS = 20
"""So many of the newest runs are read to find the one that ``resume=auto`` may mean without ``job``."""
_SHAPES_CURVE = re.compile(
    r"seed|job\..*|train\.(global_batch_size|limit_batches|clip_norm|clip_value|precision|on_nonfinite)"
)


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The run to continue, and the checkpoint and step that it continues from.

    Attributes:
        checkpoint: None for a script, which looks after its own.
        driver: who drove it last.
        train: the section of the configuration. A precision that is left to the run is the precision of the run so far.
            A run that is only evaluated has as many steps as the checkpoint.
    """

    run_dir: RunDir
    checkpoint: Path | None
    step: int
    driver: Mapping[str, Any]
    train: TrainConfig


def find_resume(
    config: Config,
    job: Job | None,
    *,
    warnings: list[str],
    redactor: Redactor,
    seen: set[str] | None = None,
    words: Sequence[str] | None = None,
) -> Resume | None:
    """Find the run that ``resume`` asks for, or the one that the driver before this one has left.

    Args:
        config: with absolute paths.
        job: to compare its model with the checkpoint; None if it has errors itself.
        warnings: receives what the user should know, such as damaged checkpoints and changed settings.
        redactor: masks secrets in settings, as it did in the record of the run.
        seen: receives the names of the directories of the runs that ``resume=auto`` has looked at.
        words: what the user has typed, if it is known.

    Returns:
        None to start a new run.

    Raises:
        ConfigError: there is no such run, it is still running, it is damaged, its model differs, or the store that has
            it cannot be used.
    """
    if (left := left_run()) is not None:
        config = replace(config, resume=left)
    if config.resume == "never":
        return None
    damaged: list[CheckpointError] = []
    runs_script = registry.load(config.strategy.name).runs_script
    with _named(f"resume={config.resume}"):
        if split_checkpoint(config.resume)[1] is not None:
            raise ValueError(
                "a run continues from its newest checkpoint; for a new run that continues from this one, set "
                f"start_from={config.resume}, and leave out resume"
            )
        if config.resume == "auto":
            looked_at = set() if seen is None else seen
            run_dir = _unfinished_run(config, warnings, looked_at, any_run=runs_script, words=words)
            if run_dir is None:
                return None
        else:
            run_dir = named_run(config, config.resume, key="resume", warnings=warnings)
            if config.resume == NEWEST:
                config = replace(config, resume=run_dir.location)  # errors name the run
        _refuse_if_running(config, run_dir)
        _refuse_another_name(config, run_dir)
        driver = run_dir.read_driver()
        if runs_script:
            fetch(run_dir)
            step = int(progress_of(run_dir).get("steps", 0))
            return Resume(run_dir=run_dir, checkpoint=None, step=step, driver=driver, train=config.train)
        checkpoint = CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints).find_newest(damaged.append)
        fetch(run_dir)
    warnings.extend(f"checkpoint skipped: {e}" for e in damaged)
    if checkpoint is None and left is not None and not damaged:
        warnings.append(f"{left} has no checkpoint yet; this is a new run")
        return None
    if checkpoint is None:
        why = "; ".join(str(e) for e in damaged) or why_no_checkpoint(run_dir.config_file)
        raise ConfigError([f"resume={config.resume}: {why}; resume=never starts a new run"])
    manifest = read_manifest(checkpoint)
    step = int(manifest["step"])
    meta = manifest["meta"]
    found = [] if job is None else continuation_errors(config, job, checkpoint, meta, is_own=True)
    before = _settings(run_dir)
    now = {} if job is None else params_of(recorded_config(config, job, redactor))
    errors = _continued(config, run_dir, "resume", found, before, now, words or ())
    # A driver that died after the last step has left a run that only lacks its end.
    is_finished = run_dir.read_record().get("state") == "finished"
    if step > config.train.steps or (step == config.train.steps and is_finished):
        errors.append(f"train.steps={config.train.steps}: the run to resume already has {step} steps; raise it")
    best = BestSoFar.from_meta(meta) if is_finished and config.checkpoint.best is not None else None
    if best is not None and (ended := best.why_stop(config.train.stop_after)) is not None:
        errors.append(f"{ended}: the run to resume has ended early at step {step}; raise train.stop_after")
    if errors:
        raise ConfigError(errors)
    train = _in_precision(config, before.get(PRECISION), warnings)
    if job is not None:
        config = replace(config, train=train)
        warnings.extend(_changes(job, before, params_of(recorded_config(config, job, redactor))))
        with _named(f"resume={config.resume}"):
            warnings.extend(_best_so_far(config, CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints)))
    return Resume(run_dir=run_dir, checkpoint=checkpoint, step=step, driver=driver, train=train)


def find_source(
    config: Config, job: Job | None, *, warnings: list[str], redactor: Redactor, words: Sequence[str] = ()
) -> Resume | None:
    """Find the checkpoint that ``evaluate`` or ``start_from`` names, for a new run; None if both are null.

    Arguments and errors as of :func:`find_resume`.
    """
    name, text = ("start_from", config.start_from) if config.evaluate is None else ("evaluate", config.evaluate)
    if text is None:
        return None
    key, damaged = f"{name}={text}", list[CheckpointError]()
    with _named(key):
        run, of_run = split_checkpoint(text)
        run_dir = named_run(config, run, key=name, warnings=warnings)
        checkpoint = _checkpoint_of(run_dir, of_run, damaged)
        if is_held(checkpoint):
            weakref.finalize(run_dir, remove_staging, checkpoint)
        fetch(run_dir)
    warnings.extend(f"checkpoint skipped: {e}" for e in damaged)
    manifest = read_manifest(checkpoint)
    step, train = int(manifest["step"]), config.train
    found = [] if job is None else continuation_errors(config, job, checkpoint, manifest["meta"], is_own=False)
    now = {} if job is None else params_of(recorded_config(config, job, redactor))
    errors = _continued(config, run_dir, name, found, _settings(run_dir), now, words)
    if config.evaluate is not None:
        train = replace(_in_precision(config, _settings(run_dir).get(PRECISION), warnings), steps=max(1, step))
    elif step >= train.steps:
        errors.append(f"train.steps={train.steps}: {key} already has {step} steps; raise it")
    if errors:
        raise ConfigError(errors)
    if config.evaluate is None and job is not None:
        # A precision that is left to the run again has not been changed.
        before = run_dir.read_record().get("params", {}) if train.precision == "auto" else _settings(run_dir)
        warnings.extend(_changes(job, before, now))
    return Resume(run_dir=run_dir, checkpoint=checkpoint, step=step, driver={}, train=train)


def _continued(
    config: Config,
    run_dir: RunDir,
    name: str,
    found: Sequence[Misfit],
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    words: Sequence[str],
) -> list[str]:
    """Return the errors of a checkpoint that the key ``name`` names; a single one if it is of another job.

    ``before``, ``now``: the parameters of the run so far, and those of ``config``.
    """
    if found and (error := other_job(config, run_dir, key=name, words=words)) is not None:
        raise ConfigError([error])
    is_other_model = any(misfit.of_model for misfit in found)
    if is_other_model and (error := other_fields(config, run_dir, before, now, key=name, words=words)) is not None:
        raise ConfigError([error])
    return [f"{name}={getattr(config, name)}: {misfit.text}" for misfit in found]


@contextlib.contextmanager
def _named(key: str) -> Iterator[None]:
    """Turn errors about the run that ``key`` names into a ``ConfigError``; errors of a store name it themselves."""
    try:
        yield
    except StorageError as e:
        raise ConfigError([str(e)]) from e
    except ConfigError:
        raise
    except ValueError as e:
        raise ConfigError([f"{key}: {e}"]) from e


def _checkpoint_of(run_dir: RunDir, name: str | None, damaged: list[CheckpointError]) -> Path:
    """Return a checkpoint of a run, ``best`` being the one of its best evaluation. The run may train on meanwhile.

    None for the newest intact one; ``damaged`` receives newer ones.

    Raises:
        ValueError: there is none.
    """
    store = CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints)
    if name is None:
        newest = store.find_newest(damaged.append, held=True)
        if newest is None:
            raise ValueError("; ".join(map(str, damaged)) or why_no_checkpoint(run_dir.config_file))
        return newest

    def chosen(names: Sequence[str]) -> str:
        if name != BEST:
            return name
        if not names:
            raise ValueError(why_no_checkpoint(run_dir.config_file))
        best = store.best()
        if best is None:
            raise ValueError(f"{why_no_best(run_dir.read_record())}; name another checkpoint, or only the run")
        return path_of(run_dir.checkpoints, best.step).name

    try:
        return store.choose(chosen, store.hold)
    except CheckpointError as e:
        kept = ", ".join(store.list()) or "none"
        raise ValueError(f"{e}; the run has the checkpoints {kept}") from e


def refuse_if_taken(config: Config, resume: Resume | None, seen: Collection[str]) -> None:
    """Refuse the run if another process has taken it since :func:`find_resume`, which has ``seen`` these runs."""
    if resume is not None:
        present = refresh(resume.run_dir) or resume.run_dir
        _refuse_if_running(config, present)
        if present.read_driver() != resume.driver:
            raise ConfigError(
                [
                    f"resume={config.resume}: another process has continued {resume.run_dir.location}; start the "
                    "command again to continue from its last checkpoint"
                ]
            )
    elif config.resume == "auto":
        for run_dir in _unfinished_runs(config, warnings=[], seen=set(seen)):
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


def _refuse_another_name(config: Config, run_dir: RunDir) -> None:
    """Refuse a name that the run does not have: by the one that it has, it is found here and in MLflow."""
    name = run_dir.read_record().get("name")
    if config.name is not None and name is not None and config.name != name:
        raise ConfigError(
            [
                f"name={config.name}: the run to resume is named {name}, and keeps its name; leave out name, or begin "
                f"a new run of another name with {path_override('start_from', run_dir.location)}"
            ]
        )


def _refuse_if_others_wait(config: Config, words: Sequence[str], *, any_run: bool) -> None:
    """Refuse to begin a run of the default job beside the unfinished run of another job, which may be meant.

    ``any_run``: as of :func:`_unfinished_run`.
    """
    output = output_dir(config)
    for run_dir, record in itertools.islice(readable(output, output.names(), []), _OTHERS):
        if record.get("state") in ("finished", "pruned") or run_dir.driver_if_running() is not None:
            continue
        if not any_run and not CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints).list():
            continue
        if (error := other_job(config, run_dir, key="resume", words=words)) is not None:
            raise ConfigError([f"{error}; for a new run, add its job=, or resume=never"])
        return


def _unfinished_run(
    config: Config, warnings: list[str], seen: set[str], *, any_run: bool, words: Sequence[str] | None
) -> RunDir | None:
    """Return the newest unfinished run of this name that has a checkpoint, None to start a new run.

    Args:
        any_run: whether it needs no checkpoint.
        words: as of :func:`find_resume`.

    Raises:
        ConfigError: that run, or a newer one, is still running; or the words choose no job, and a run of another one
            can be meant.
    """
    without: list[str] = []
    for run_dir in _unfinished_runs(config, warnings, seen):
        _refuse_if_running(config, run_dir)
        if any_run or CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints).list():
            warnings.extend(f"resume=auto: {path} has no checkpoint; an older run is continued" for path in without)
            return run_dir
        without.append(run_dir.location)
    if without:
        warnings.append(f"resume=auto: {without[0]} has no checkpoint yet; this is a new run")
    else:
        if words is not None and not chooses_job(words) and config.name is None:
            _refuse_if_others_wait(config, words, any_run=any_run)
        warnings.append(f"resume=auto: no unfinished run is named {config.run_name}; this is a new one")
    return None


def _unfinished_runs(config: Config, warnings: list[str], seen: set[str]) -> Iterator[RunDir]:
    """Yield the unfinished runs of this name that were not ``seen`` before, the newest first, and enter them there."""
    output = output_dir(config)
    new = [name for name in output.names(config.run_name) if name not in seen]
    for run_dir, record in readable(output, new, warnings):
        seen.add(name_of(run_dir))
        if record.get("name") == config.run_name and record.get("state") not in ("finished", "pruned"):
            yield run_dir


def _settings(run_dir: RunDir) -> Mapping[str, Any]:
    """Return the parameters of a run so far, with the precision that its workers computed in."""
    record = run_dir.read_record()
    params = record.get("params", {})
    return {**params, PRECISION: record["precision"]} if "precision" in record else params


def _in_precision(config: Config, before: Any, warnings: list[str]) -> TrainConfig:
    """Return the section ``train``, with the precision ``before`` in place of ``auto``."""
    train = config.train
    if train.precision != "auto" or before in (None, "auto"):
        return train
    if before != "fp32":
        warnings.append(f"{PRECISION}=auto: the run continues in {before}, as before")
    return replace(train, precision=before)


def _best_so_far(config: Config, store: CheckpointStore) -> Iterator[str]:
    """Yield a note if the run no longer follows the metric of its best checkpoint, with the keys to follow it again."""
    best, own = store.best(), config.checkpoint
    if best is None or (best.metric, best.direction) == (own.best, own.best and own.direction):
        return
    direction = "" if best.metric.endswith("loss") and best.direction == "minimize" else best.direction
    key = f"checkpoint.best={best.metric}" + (f" checkpoint.best_direction={direction}" if direction else "")
    yield (
        f"the best checkpoint so far, by {best.metric}, is that of step {best.step}; it is kept, but no longer "
        f"updated; add {key} to continue"
    )


def _changes(job: Job, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return which settings have changed that change the loss curve."""
    differ = [k for k, value in now.items() if k in before and before[k] != value and _SHAPES_CURVE.fullmatch(k)]
    fields = [key for key in differ if key.startswith("job.")]
    changed = [f"{key} was {before[key]} before; it is {now[key]} from now on" for key in differ if key not in fields]
    if fields:
        told = ", and ".join(f"{key} was {before[key]} before and is {now[key]} now" for key in fields)
        changed.append(f"{told}; the optimizer keeps its settings from the checkpoint, including the learning rate")
    steps = before.get(STEPS, now[STEPS])
    if steps != now[STEPS] and type(job).scheduler is not Job.scheduler:
        changed.append(f"{STEPS} was {steps} before; the learning rate follows a schedule of {now[STEPS]} from now on")
    return changed
