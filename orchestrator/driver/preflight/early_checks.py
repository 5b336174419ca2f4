"""What can be refused in half a second, before torch is imported and Ray starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.config.build import ConfigError, collect_errors
from orchestrator.config.compose import compose, placed
from orchestrator.config.job_source import source_errors
from orchestrator.config.overrides import values
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config, JobSpec
from orchestrator.storage.remote import is_url
from orchestrator.strategies import registry

_SCRIPT = "orchestrator.strategies.external.job.Script"
_NO_RUN = (None, "never", "auto")


def refuse_early(runs: Sequence[Sequence[str]], redactor: Redactor, *, starts_here: bool) -> None:
    """Refuse wrong keys, values and fields of a job, and what is missing; the whole check of the runs comes later.

    Args:
        runs: the words of each run.
        redactor: learns the secrets among them, and masks them in errors.
        starts_here: whether the runs start on this machine, with its files.

    Raises:
        ConfigError: something is wrong.
    """
    errors: list[str] = []
    for words in runs:
        redactor.learn(values(words))
        own: list[str] = []
        config, job = compose(words, own, registry.config_class)
        brings_code = config is not None and bool(config.cluster.py_modules or config.cluster.pip)
        if job is not None and not brings_code:
            own += _job_errors(job, redactor)
        if config is not None and starts_here and words is runs[0]:
            own += _missing_here(config, words, brings_code=brings_code)
        errors += placed(words, own)
    if errors:
        raise ConfigError(map(redactor.text, dict.fromkeys(errors)))


def _job_errors(spec: JobSpec, redactor: Redactor) -> list[str]:
    if spec.target != _SCRIPT:
        return source_errors(spec)
    from orchestrator.config.job_loader import load_job

    errors: list[str] = []
    load_job(spec, errors, redactor)
    return errors


def _missing_here(config: Config, words: Sequence[str], *, brings_code: bool) -> Iterator[str]:
    """Yield what is wrong with the places of the results, and the runs that are not there; no store is asked."""
    # Imported here because a wrong key needs none of it, and is answered in half the time.
    from orchestrator.driver.preflight.named_runs import chooses_job, named_run, other_job
    from orchestrator.driver.preflight.run_config import absolute_paths, environment_errors
    from orchestrator.driver.process.origin import left_run
    from orchestrator.records.run_dir import split_checkpoint

    if is_url(config.output_dir):
        return
    config = absolute_paths(config)
    if not brings_code:
        yield from environment_errors(config)
    for key in ("resume", "start_from", "evaluate"):
        text = getattr(config, key)
        if text not in _NO_RUN and not is_url(text) and left_run() is None:
            errors: list[str] = []
            with collect_errors(errors):
                run_dir = named_run(config, split_checkpoint(text)[0], key=key, warnings=[])
                if not chooses_job(words):
                    errors += filter(None, [other_job(config, run_dir, key=key, words=words)])
            yield from errors
