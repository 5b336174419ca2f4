"""The model of a run in a format that its job writes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from orchestrator.config.build import build
from orchestrator.config.compose import recorded_job
from orchestrator.config.job_loader import find_class
from orchestrator.config.text import did_you_mean
from orchestrator.job import Job
from orchestrator.records.run_dir import RunDir
from orchestrator.state.best import best_step
from orchestrator.state.checkpoint import path_of, step_of
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.manifest import CheckpointError


def export_run(run_dir: RunDir, directory: Path, *, format: str, best: bool) -> int:
    """Write the weights of the newest checkpoint of a run, or of the ``best``, into a new directory.

    The directory is there if and only if everything is in it.

    Returns:
        The step of the weights.

    Raises:
        ValueError: the directory exists, there is no such checkpoint or it is damaged, or the job cannot write it.
        OSError: a file cannot be read or written.
    """
    if directory.exists():
        raise ValueError(f"--to={directory}: exists already; name a directory that does not")
    job = _job(run_dir, format)
    store = CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints)
    checkpoint = _checkpoint(store, run_dir, best=best)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
        made = Path(scratch) / directory.name
        try:
            job.export(store.model(checkpoint, Path(scratch)), made, format)
        except (OSError, CheckpointError):
            raise
        except Exception as e:  # of any type: the code of the job
            reason = str(e) if type(e) is ValueError else f"{type(e).__name__}: {e}"
            raise ValueError(f"{type(job).__name__}.export: {reason}") from e
        made.rename(directory)
    return step_of(checkpoint)


def _job(run_dir: RunDir, format: str) -> Job:
    """Return the job of the run without a call of its ``check``, because its data need not be here."""
    spec, errors = recorded_job(run_dir.config_file), list[str]()
    cls = find_class(spec.target, errors)
    if cls is not None and format not in cls.export_formats:
        known = did_you_mean(format, cls.export_formats) if cls.export_formats else "it defines no Job.export"
        raise ValueError(f"--format={format}: {spec.target} cannot be written so; {known}")
    job = None if cls is None else build(cls, spec.fields, "job", errors)
    if job is None:
        raise ValueError("; ".join(errors))
    return job


def _checkpoint(store: CheckpointStore, run_dir: RunDir, *, best: bool) -> str:
    names = store.list()
    if not names:
        raise ValueError("the run has no checkpoint")
    if not best:
        return names[-1]
    step = best_step(store.read_manifest(names[-1])["meta"])
    if step is None:
        raise ValueError("--best: the run was trained without checkpoint.best; leave it out for the newest checkpoint")
    return path_of(run_dir.checkpoints, step).name
