"""The job of a run, built again without a call of its ``check``, because its data need not be here."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.build import build
from orchestrator.config.job_loader import find_class, unmasked
from orchestrator.config.recorded_config import recorded_job
from orchestrator.config.text import did_you_mean
from orchestrator.job import Job


def job_to_export(config_file: Path, format: str) -> Job:
    """Return the job in a ``config.yaml``.

    Raises:
        ValueError: the job cannot be built, or does not know the format.
    """
    spec, errors = recorded_job(config_file), list[str]()
    cls = find_class(spec.target, errors)
    if cls is not None and format not in cls.export_formats:
        known = did_you_mean(format, cls.export_formats) if cls.export_formats else "it defines no Job.export"
        raise ValueError(f"--format={format}: no format of {spec.target}; {known}")
    job = None if cls is None else build(cls, unmasked(spec, errors).fields, "job", errors)
    if job is None or errors:
        raise ValueError("; ".join(errors))
    return job
