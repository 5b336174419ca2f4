"""Export the final model of a run, and what identifies its training set.

``python -m orchestrator.features.export <run directory> <new folder> [model] [dataset]``

The folder receives ``facts.json`` (:class:`Facts`). With ``model``, and if there is a checkpoint, it also receives:

- ``model.safetensors``: the weights.
- ``model.pt2``, ``example.npz``, ``loader.py``: the graph, an example input and the code that loads them; or
- ``README.md``, if the model cannot run without its code.

A process of its own, because the export imports torch's compiler, takes seconds, and runs code of the job.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestrator.compat.ray import refused
from orchestrator.compat.torch import as_bytes, pytree
from orchestrator.config.job_loader import load_job, unmasked
from orchestrator.config.recorded_config import recorded_job
from orchestrator.config.redact import MASK, Redactor, masked_output
from orchestrator.config.schema import JobSpec
from orchestrator.features.export.comparison import LIMITS, data_of, difference, example_batch, run_trained, said
from orchestrator.features.export.formats import NotExportedError, export_program, prediction_inputs
from orchestrator.job import Job
from orchestrator.model.batch import split_batch
from orchestrator.records.output_dir import staged_run
from orchestrator.records.run_dir import RunDir
from orchestrator.state import tensor_file
from orchestrator.state.checkpoint import step_of
from orchestrator.state.checkpoint_store import CheckpointStore, exported_weights, exports_average
from orchestrator.state.model_state import LEFT_OUT, own_tensors
from orchestrator.state.tensor_file import StoredTensors
from orchestrator.strategies.data.datasets import is_stream, known_length
from orchestrator.user_code.errors import error_text, exits_refused
from orchestrator.user_code.steering import steer_as_trained

MAX_BYTES = 1_000_000_000
"""Weights that are larger stay in the checkpoint."""

_EXAMPLE_SIZE = 4
_PREDICTION_TIMEOUT_S = 240.0
_WEIGHTS, _PROGRAM, _EXAMPLE, _LOADER, _FOUND = (
    "model.safetensors",
    "model.pt2",
    "example.npz",
    "loader.py",
    "found.npz",
)
_PREDICT = """
import importlib.util, pathlib, sys, types
import numpy as np
pyfunc, models = types.SimpleNamespace(PythonModel=object), types.SimpleNamespace(set_model=lambda model: None)
sys.modules["mlflow"] = types.SimpleNamespace(pyfunc=pyfunc, models=models)  # its import takes longer than the rest
folder, (program, weights, example, loader) = pathlib.Path(sys.argv[1]), sys.argv[2:]
spec = importlib.util.spec_from_file_location("loader", folder / loader)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
model = module.ExportedModel()
files = {"program": str(folder / program), "weights": str(folder / weights)}
model.load_context(types.SimpleNamespace(artifacts=files))
with np.load(folder / example) as arrays:
    inputs = {name.removeprefix("input:"): arrays[name] for name in arrays}
found = model.predict(None, inputs[""] if list(inputs) == [""] else inputs)
found = list(found.values()) if isinstance(found, dict) else [found]
np.savez(folder / "found.npz", *found)
"""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known about the final model and the data of a run. What was not asked for is None.

    Attributes:
        dataset: the result of :func:`dataset_facts`; None if the job cannot be built.
        step: when the weights were saved; None if there are none.
        averaged: whether they are moving averages.
        problem: why there is no graph or there are no weights; None if there are both.
    """

    dataset: Mapping[str, Any] | None = None
    step: int | None = None
    averaged: bool = False
    problem: str | None = None


def main(run_dir: RunDir, folder: Path, exports: Collection[str]) -> None:
    """Write the folder. ``exports``: ``model``, ``dataset`` or both."""
    folder.mkdir()
    facts = _export_run(run_dir, folder, exports)
    (folder / "facts.json").write_text(json.dumps(asdict(facts)))


def _export_run(run_dir: RunDir, folder: Path, exports: Collection[str]) -> Facts:
    spec, redactor = recorded_job(run_dir.config_file), Redactor.of_process()
    facts, tensors, manifest = _weights(run_dir, folder) if "model" in exports else (Facts(), None, {})
    try:
        with exits_refused(), masked_output(redactor):
            job = _job(spec, redactor)
            dataset = data_of(job, "train")
            if "dataset" in exports:
                facts = replace(facts, dataset=dataset_facts(spec, dataset))
            if tensors is not None:
                steer_as_trained(job, manifest)
                _export(job, dataset, tensors, folder)
    except Exception as e:  # of any type: the code of the job
        problem = redactor.text(str(e) if isinstance(e, NotExportedError) else error_text(e))
        if "model" in exports:
            facts = replace(facts, problem=facts.problem or problem)
        if tensors is not None:
            (folder / "README.md").write_text(_readme(spec, problem=problem), errors="replace")
    return facts


def _weights(run_dir: RunDir, folder: Path) -> tuple[Facts, Mapping[str, Tensor] | None, Mapping[str, Any]]:
    """Copy the weights of the best checkpoint, or of the newest.

    Returns:
        What is known, the weights and the manifest of the checkpoint; None for the weights, and why, if there are none.

    Raises:
        OSError, ValueError: the checkpoint cannot be read.
    """
    store = CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints)
    names = store.list()
    if not names:
        return Facts(problem="there is no checkpoint"), None, {}
    best = store.best()
    chosen = {step_of(name): name for name in names}.get(0 if best is None else best.step, names[-1])
    manifest = store.read_manifest(chosen)
    step, size = int(manifest["step"]), store.model_size(chosen)
    if LEFT_OUT in manifest["meta"]:
        problem = f"{chosen} has only the weights that are trained (checkpoint.only_trained)"
        return Facts(problem=problem), None, manifest
    if size > MAX_BYTES:
        limit = f"the limit is {MAX_BYTES / 1e9:.1f} GB"
        return Facts(problem=f"the weights in {chosen} have {size / 1e9:.1f} GB, {limit}"), None, manifest
    with tempfile.TemporaryDirectory(dir=folder) as parts:
        digests = tensor_file.write(folder / _WEIGHTS, exported_weights(store, chosen, Path(parts)))
    facts = Facts(step=step, averaged=exports_average(store, chosen))
    return facts, StoredTensors(folder, {_WEIGHTS: digests}), manifest


def _job(spec: JobSpec, redactor: Redactor) -> Job:
    errors: list[str] = []
    spec = unmasked(spec, errors)
    job = None if errors else load_job(spec, errors, redactor)
    if job is None:
        raise NotExportedError(" ".join(errors))
    return job


def _export(job: Job, dataset: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    inputs = prediction_inputs(split_batch(example_batch(job, dataset, _EXAMPLE_SIZE))[0])
    expected, _ = run_trained(job, tensors, inputs)
    torch.manual_seed(0)
    model = job.model()
    own = own_tensors(model)
    weights = {name: tensor.to(own[name].dtype) for name, tensor in tensors.items() if name in own}
    program = export_program(job, model, weights, inputs)
    torch.export.save(program, folder / _PROGRAM)
    named = {"": inputs} if isinstance(inputs, Tensor) else inputs
    arrays: dict[str, Any] = {f"input:{name}": tensor.numpy() for name, tensor in named.items()}
    with (folder / _EXAMPLE).open("wb") as file:
        np.savez(file, **arrays)
    shutil.copyfile(Path(__file__).with_name(_LOADER), folder / _LOADER)
    if any(weights[name].dtype != tensors[name].dtype for name in weights):  # the graph takes no other types
        tensor_file.write(folder / "new", weights)
        (folder / "new").replace(folder / _WEIGHTS)
    try:
        _compare(expected, folder)
    except NotExportedError:
        for name in (_PROGRAM, _EXAMPLE, _LOADER):
            (folder / name).unlink()
        raise


def _compare(expected: Sequence[Tensor], folder: Path) -> None:
    """Let the code that MLflow loads predict in a process that has only these files.

    Raises:
        NotExportedError: it cannot, or predicts something else than the trained model.
    """
    words = [sys.executable, "-B", "-c", _PREDICT, str(folder.absolute()), _PROGRAM, _WEIGHTS, _EXAMPLE, _LOADER]
    try:
        ended = subprocess.run(
            words, check=False, capture_output=True, stdin=subprocess.DEVNULL, text=True, cwd=folder,
            timeout=_PREDICTION_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise NotExportedError(f"another process took longer than {_PREDICTION_TIMEOUT_S:.0f} s to predict") from e
    if ended.returncode:
        (*_, why) = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise NotExportedError(f"another process cannot load it: {why}")
    with np.load(folder / _FOUND) as arrays:
        found = [torch.from_numpy(arrays[name]) for name in sorted(arrays, key=lambda name: int(name[4:]))]
    (folder / _FOUND).unlink()
    if (error := difference(found, expected)) > (limit := max(LIMITS.get(t.dtype, 0.0) for t in expected)):
        raise NotExportedError(said(error, limit))


def _readme(spec: JobSpec, *, problem: str) -> str:
    fields = ", ".join(f"{name}={value!r}" for name, value in spec.fields.items() if value != MASK)
    module, _, name = spec.target.rpartition(".")
    return (
        f"`model.safetensors` has the weights of the model. It cannot run without its code: {problem}\n\n"
        "    from safetensors.torch import load_file\n"
        f"    from {module} import {name}\n\n"
        f"    model = {name}({fields}).model()\n"
        '    model.load_state_dict(load_file("model.safetensors"))\n'
    )


_DIGEST_LENGTH = 16


def dataset_facts(spec: JobSpec, dataset: Any) -> dict[str, Any]:
    """Return the ``name``, ``digest`` and number of ``samples`` (None if unknown) of a training set.

    The digest covers the job's class and fields, the number of samples, and of a map-style dataset the first and the
    last sample.
    """
    samples = known_length(dataset)
    digest = hashlib.sha256(repr((spec.target, sorted(spec.fields.items()), samples)).encode())
    if samples is not None and not is_stream(dataset):
        for index in (0, samples - 1):
            for leaf in pytree.tree_leaves(dataset[index]):
                digest.update(_bytes_of(leaf))
    return {"name": spec.target.rpartition(".")[2], "digest": digest.hexdigest()[:_DIGEST_LENGTH], "samples": samples}


def _bytes_of(value: Any) -> bytes:
    """The contents of a part of a sample; of an object of another library, only its type."""
    if isinstance(value, Tensor):
        return as_bytes(value.detach()).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    plain = isinstance(value, (str, bytes, int, float, bool, type(None)))
    return (repr(value) if plain else type(value).__name__).encode()


if __name__ == "__main__":
    torch.set_num_threads(1)
    refused.refuse()
    main(staged_run(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3:])
    os._exit(0)  # threads of a dataset must not keep this process
