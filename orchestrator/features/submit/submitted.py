"""The checks of a launch that will run on another machine, as a submitted job."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.compat.ray.code_packages import max_upload_bytes
from orchestrator.config.build import ConfigError, collect_errors
from orchestrator.config.compose import compose, own_files, preset_sweep
from orchestrator.config.files import DEFAULT_DIR, DIR_OPTION, conf_dir
from orchestrator.config.job_loader import load_job
from orchestrator.config.overrides import example, expand_sweep, is_search, values
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config, JobSpec
from orchestrator.config.secret_names import is_secret
from orchestrator.driver.code.shipped_code import ignored_errors, loaded_files, module_size_errors, size_errors
from orchestrator.job import Job
from orchestrator.strategies import registry


def checked(words: Sequence[str], working_dir: Path, redactor: Redactor, *, sweep: bool) -> list[Config]:
    """Return the configuration of each run that ``words`` launch, with all that can be checked on this machine.

    The code of the job is checked if this process runs in the ``working_dir`` that travels.

    Raises:
        ConfigError: with all errors.
    """
    if not working_dir.is_dir():
        raise ConfigError([f"--working-dir={working_dir}: no such directory"])
    errors: list[str] = []
    configs: list[Config] = []
    words = local_words(words, working_dir)
    for run in _runs(words, sweep=sweep):
        config, job = compose(run, errors, registry.config_class)
        made = load_job(job, errors, redactor) if job is not None and working_dir == Path.cwd() else None
        if config is not None and job is not None:
            with collect_errors(errors):
                needed = {path: str(path.relative_to(working_dir)) for path in own_files(run)}
                needed |= _needed_files(job, made, working_dir)
                errors += ignored_errors(working_dir, needed, config.cluster.py_modules)
        if config is not None:
            errors += _local_only(config)
            with collect_errors(errors):
                errors += module_size_errors(config.cluster.py_modules, limit=max_upload_bytes())
            configs.append(config)
    errors += size_errors(working_dir, what=f"--working-dir={working_dir}", limit=max_upload_bytes())
    if errors:
        raise ConfigError(list(dict.fromkeys(map(redactor.text, errors))))
    return configs


def _needed_files(spec: JobSpec, job: Job | None, working_dir: Path) -> dict[Path, str]:
    """Return what a job needs of the ``working_dir``, with the key that says so: its code, and files that it names.

    Without the ``job`` itself, this is the file of its class.
    """
    target = f"job._target_={spec.target}"
    if job is None:
        module = working_dir.joinpath(*spec.target.split(".")[:-1])
        files = [path for path in (module.with_suffix(".py"), module / "__init__.py") if path.is_file()]
        return dict.fromkeys(files, target)
    modules = [module for name, module in sys.modules.items() if name != "__main__"]
    needed = dict.fromkeys(loaded_files(working_dir, modules), target)
    for field in dataclasses.fields(job):
        value = getattr(job, field.name)
        for text in value if isinstance(value, (list, tuple)) else [value]:
            with contextlib.suppress(OSError, ValueError, TypeError):  # it is no path
                path = Path(os.path.normpath(working_dir / text))
                if path.is_file():
                    needed[path] = f"job.{field.name}={text}"
    return {path: what for path, what in needed.items() if path.is_relative_to(working_dir)}


def _runs(words: Sequence[str], *, sweep: bool) -> Sequence[Sequence[str]]:
    if not sweep:
        return [words]
    preset = preset_sweep(words)
    return [example(words, preset)] if is_search(words, preset) else expand_sweep(words, preset)


def local_words(words: Sequence[str], working_dir: Path) -> list[str]:
    """Return ``words`` with the files in the directory that travels, in which the job will look for them.

    Raises:
        ConfigError: ``--config-dir`` is outside of it.
    """
    given = next((word.partition("=")[2] for word in words if word.startswith(f"{DIR_OPTION}=")), None)
    own = working_dir / (DEFAULT_DIR if given is None else given)
    if given is not None and (Path(given).is_absolute() or not own.resolve().is_relative_to(working_dir.resolve())):
        raise ConfigError([f"{DIR_OPTION}={given}: does not travel; give a directory in --working-dir, relative to it"])
    if given is None and not own.is_dir():
        own = conf_dir()  # and not one in the directory of this process
    return [f"{DIR_OPTION}={own}", *(word for word in words if not word.startswith(f"{DIR_OPTION}="))]


def visible_secrets(words: Sequence[str]) -> list[str]:
    """Return the keys of ``words`` that hold secrets, which Ray's dashboard would show in the command of the job."""
    return [key for key in values(words) if is_secret(key)]


def _local_only(config: Config) -> list[str]:
    errors = []
    if config.cluster.address == "local":
        errors.append("cluster=local: a submitted job would ignore the cluster; leave it out")
    if config.plan:
        errors.append("plan=true: shows a plan and stops; use it with `orchestrator launch`")
    return errors
