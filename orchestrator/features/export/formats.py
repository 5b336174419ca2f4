"""The model of a run in a format of its job, or as a program that needs none of the job's code.

The program is a graph of ``torch.export``, which takes the weights as an argument, so that its file has none of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import seed_generators
from orchestrator.config.compose import recorded_data
from orchestrator.config.recorded_config import why_no_best, why_no_checkpoint
from orchestrator.config.redact import Redactor
from orchestrator.features.export.comparison import Comparison, compare
from orchestrator.features.export.recorded import job_to_export
from orchestrator.job import Job
from orchestrator.planning.placement import Box
from orchestrator.records.run_dir import RunDir
from orchestrator.state.checkpoint import path_of, step_of
from orchestrator.state.checkpoint_store import CheckpointStore, exported_weights, exports_average
from orchestrator.state.manifest import CheckpointError
from orchestrator.state.model_state import LEFT_OUT, check_built, checksum, own_tensors
from orchestrator.user_code.errors import error_text
from orchestrator.user_code.steering import steer_as_trained


@dataclass(frozen=True, kw_only=True)
class Export:
    """What has been exported.

    Attributes:
        step: of the weights.
        averaged: whether they are moving averages.
        comparison: of the export with the trained model.
    """

    step: int
    averaged: bool
    comparison: Comparison


def export_run(run_dir: RunDir, directory: Path, redactor: Redactor, *, format: str, best: bool) -> Export:
    """Write the weights of the newest checkpoint of a run, or of the ``best``, into a new directory.

    The directory is there if and only if everything is in it, and what it computes is what the trained model computes
    or cannot be compared. ``redactor`` learns the secrets of the job.

    Raises:
        ValueError: the directory exists, there is no such checkpoint or it is damaged, the job cannot write it, or
            what it has written computes something else.
        OSError: a file cannot be read or written.
    """
    if directory.exists():
        raise ValueError(f"--to={directory}: exists already; name a directory that does not")
    job = job_to_export(run_dir.config_file, format)
    redactor.learn(job)
    store = CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
        made = Path(scratch) / directory.name

        def read(checkpoint: str) -> tuple[str, Mapping[str, Tensor]]:
            steer_as_trained(job, store.read_manifest(checkpoint))
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
        beside = Path(tempfile.mkdtemp(dir=scratch))
        compared = compare(
            job,
            model,
            run_dir.config_file,
            made,
            format,
            manifest=store.read_manifest(checkpoint),
            size=store.model_size(checkpoint),
            folder=beside,
        )
        if compared.fault is not None:
            others = " or ".join(f"--format={other}" for other in job.export_formats if other != format)
            raise ValueError(
                f"{type(job).__name__}.export: wrote another model than the trained one: {compared.fault}"
                + (f"; try {others}" if others else "")
            )
        made.rename(directory)
    return Export(step=step_of(checkpoint), averaged=exports_average(store, checkpoint), comparison=compared)


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


def _checkpoint(store: CheckpointStore, names: Sequence[str], run_dir: RunDir, *, best: bool) -> str:
    if not names:
        raise ValueError(f"{run_dir.location}: {why_no_checkpoint(run_dir.config_file)}")
    if not best:
        return names[-1]
    evaluation = store.best()
    if evaluation is None:
        raise ValueError(f"--best: {why_no_best(run_dir.read_record())}; leave it out for the newest checkpoint")
    return path_of(run_dir.checkpoints, evaluation.step).name


Inputs = Tensor | dict[str, Tensor]

_TOLERANCE = 1e-4
_LABELS = "labels"
"""The key under which a batch of Hugging Face has the targets; their models return predictions without it."""


class NotExportedError(Exception):
    """The model cannot run without its code. The text says why."""


def prediction_inputs(inputs: Any) -> Inputs:
    """Return the input of a batch as a caller gives it for predictions: a tensor, or tensors by name.

    Raises:
        NotExportedError: the input is something else.
    """
    if isinstance(inputs, Tensor):
        return inputs
    if isinstance(inputs, Mapping):
        named = {str(name): value for name, value in inputs.items() if name != _LABELS}
        if all(isinstance(value, Tensor) for value in named.values()):
            return named
    raise NotExportedError(f"its input is a {type(inputs).__name__}, not a tensor or tensors by name")


def export_program(
    job: Job, model: nn.Module, tensors: Mapping[str, Tensor], inputs: Inputs
) -> torch.export.ExportedProgram:
    """Return ``job.forward`` as a graph of ``(tensors, inputs)``, for batches of any size if the model allows it.

    Args:
        job: the job of the model.
        model: what ``job.model()`` returned; its own weights are not used.
        tensors: parameters and buffers by name.
        inputs: an example batch with at least two samples.

    Raises:
        NotExportedError: the graph cannot be made, or computes something else.
    """
    eager = _Prediction(job, model.eval())
    tensors = dict(tensors)
    batch = torch.export.Dim.AUTO
    of_inputs = {0: batch} if isinstance(inputs, Tensor) else {name: {0: batch} for name in inputs}
    try:
        with torch.no_grad():
            expected = eager(tensors, inputs)
            shapes = ({name: None for name in tensors}, of_inputs)
            program = torch.export.export(eager, (tensors, inputs), dynamic_shapes=shapes)
            found = program.module()(tensors, inputs)
            torch.testing.assert_close(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE)
    except Exception as e:  # of any type: the code of the job, and of torch's tracer
        raise NotExportedError(f"{type(e).__name__}: {' '.join(str(e).split())[:300]}") from e
    program.example_inputs = None  # they contain the weights
    return program


class _Prediction(nn.Module):
    """``job.forward`` as a function of the weights and the input."""

    def __init__(self, job: Job, model: nn.Module):
        super().__init__()
        # In a tuple, the model is no submodule, so that its own weights do not become part of the graph.
        self._unregistered = (_Forward(job, model),)

    def forward(self, tensors: dict[str, Tensor], inputs: Inputs) -> Any:
        named = {f"model.{name}": tensor for name, tensor in tensors.items()}
        # A checkpoint has tied weights under each of their names.
        return _plain(torch.func.functional_call(self._unregistered[0], named, (inputs,), tie_weights=False))


class _Forward(nn.Module):
    def __init__(self, job: Job, model: nn.Module):
        super().__init__()
        self.model = model
        self._job = job

    def forward(self, inputs: Inputs) -> Any:
        return self._job.forward(self.model, inputs)


def _plain(output: Any) -> Any:
    """The tensors of an output: one, or a dict of them; types of other libraries could not be loaded without these."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        output = {f"output_{i}": value for i, value in enumerate(output)}
    if isinstance(output, Mapping):
        tensors = {str(name): value for name, value in output.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
    raise NotExportedError(f"its output is a {type(output).__name__} without tensors")
