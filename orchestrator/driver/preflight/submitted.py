"""The checks of a launch that will run on another machine, as a submitted job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.compat.ray.packages import max_upload_bytes
from orchestrator.config.build import ConfigError, collect_errors
from orchestrator.config.compose import compose
from orchestrator.config.job_loader import load_job
from orchestrator.config.overrides import expand_sweep, values
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.config.search_space import example, is_search
from orchestrator.config.secret_names import is_secret
from orchestrator.driver.code.packages import module_size_errors, size_errors
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
    for run in _runs(words, sweep=sweep):
        config, job = compose(run, errors, registry.config_class)
        if job is not None and working_dir == Path.cwd():
            load_job(job, errors, redactor)
        if config is not None:
            errors += _local_only(config)
            with collect_errors(errors):
                errors += module_size_errors(config.cluster.py_modules, limit=max_upload_bytes())
            configs.append(config)
    errors += size_errors(working_dir, what=f"--working-dir={working_dir}", limit=max_upload_bytes())
    if errors:
        raise ConfigError(list(dict.fromkeys(map(redactor.text, errors))))
    return configs


def _runs(words: Sequence[str], *, sweep: bool) -> Sequence[Sequence[str]]:
    if not sweep:
        return [words]
    return [example(words)] if is_search(words) else expand_sweep(words)


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
