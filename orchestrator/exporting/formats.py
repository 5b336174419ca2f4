"""The model of a run in a format that its job writes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from orchestrator.compat.generators import seed_generators
from orchestrator.config.build import build
from orchestrator.config.compose import recorded_data, recorded_job
from orchestrator.config.job_loader import find_class, unmasked
from orchestrator.config.recorded import why_no_checkpoint
from orchestrator.config.text import did_you_mean
from orchestrator.job import Job
from orchestrator.planning.boxes import Box
from orchestrator.records.run_dir import RunDir
from orchestrator.state.averages import exported_weights, exports_average
from orchestrator.state.checkpoint import path_of, step_of
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.manifest import CheckpointError
from orchestrator.state.model_state import LEFT_OUT, check_built, checksum, own_tensors
from orchestrator.user_code.exits import error_text


def export_run(run_dir: RunDir, directory: Path, *, format: str, best: bool) -> tuple[int, bool]:
    """Write the weights of the newest checkpoint of a run, or of the ``best``, into a new directory.

    The directory is there if and only if everything is in it.

    Returns:
        The step of the weights, and whether they are moving averages.

    Raises:
        ValueError: the directory exists, there is no such checkpoint or it is damaged, or the job cannot write it.
        OSError: a file cannot be read or written.
    """
    if directory.exists():
        raise ValueError(f"--to={directory}: exists already; name a directory that does not")
    job = _job(run_dir, format)
    store = CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
        made = Path(scratch) / directory.name

        def read(checkpoint: str) -> tuple[str, Mapping[str, Tensor]]:
            return checkpoint, _whole_model(job, store, checkpoint, Path(scratch), run_dir)

        checkpoint, model = store.choose(lambda names: _checkpoint(store, names, run_dir, best=best), read)
        try:
            job.export(model, made, format)
        except (OSError, CheckpointError):
            raise
        except Exception as e:  # of any type: the code of the job
            reason = str(e) if type(e) is ValueError else error_text(e)
            raise ValueError(f"{type(job).__name__}.export: {reason}") from e
        if not made.is_dir():
            raise ValueError(f"{type(job).__name__}.export: wrote nothing; write into the directory that it is given")
        for file in made.rglob("*"):  # safetensors makes files that nobody else may read
            file.chmod(file.stat().st_mode | made.stat().st_mode & 0o666)
        made.rename(directory)
    return step_of(checkpoint), exports_average(store, checkpoint)


def _whole_model(
    job: Job, store: CheckpointStore, checkpoint: str, folder: Path, run_dir: RunDir
) -> Mapping[str, Tensor]:
    """Return the weights in a checkpoint, with what the job builds of them if that is left out there.

    Raises:
        FrozenError: the job builds other frozen parameters than the checkpoint was trained with.
    """
    stored = exported_weights(store, checkpoint, folder)
    left_out: Mapping[str, int] = store.read_manifest(checkpoint)["meta"].get(LEFT_OUT, {})
    if not left_out:
        return stored
    seed_generators(recorded_data(run_dir.config_file).get("seed", 0))  # frozen parameters may be random
    dtype = next(t.dtype for t in stored.values() if t.is_floating_point())  # of train.precision
    own = {n: t.to(dtype) if t.is_floating_point() else t for n, t in own_tensors(job.model()).items()}
    check_built(left_out, {n: checksum(own[n], Box.whole(own[n].shape)) for n in left_out if n in own})
    return {name: own[name] if name in left_out else stored[name] for name in own}


def _job(run_dir: RunDir, format: str) -> Job:
    """Return the job of the run without a call of its ``check``, because its data need not be here."""
    spec, errors = recorded_job(run_dir.config_file), list[str]()
    cls = find_class(spec.target, errors)
    if cls is not None and format not in cls.export_formats:
        known = did_you_mean(format, cls.export_formats) if cls.export_formats else "it defines no Job.export"
        raise ValueError(f"--format={format}: {spec.target} cannot be written so; {known}")
    job = None if cls is None else build(cls, unmasked(spec, errors).fields, "job", errors)
    if job is None or errors:
        raise ValueError("; ".join(errors))
    return job


def _checkpoint(store: CheckpointStore, names: Sequence[str], run_dir: RunDir, *, best: bool) -> str:
    if not names:
        raise ValueError(f"{run_dir.location}: {why_no_checkpoint(run_dir.config_file)}")
    if not best:
        return names[-1]
    evaluation = store.best()
    if evaluation is None:
        raise ValueError("--best: the run was trained without checkpoint.best; leave it out for the newest checkpoint")
    return path_of(run_dir.checkpoints, evaluation.step).name
