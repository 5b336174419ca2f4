"""The output of an export beside that of the model it was made of, on one batch. A process of its own loads the export.

``python -m orchestrator.features.export.comparison <folder> <config.yaml> <export> <format>``

The folder has the input and the output of the trained model, and receives ``result.json``: a :class:`Comparison`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import default_collate

from orchestrator.compat.generators import seed_generators
from orchestrator.compat.torch import pytree
from orchestrator.features.export.recorded import job_to_export
from orchestrator.job import Job
from orchestrator.model.batch import split_batch
from orchestrator.state.manifest import CheckpointError
from orchestrator.state.model_state import own_tensors
from orchestrator.strategies.data.datasets import is_stream, needs_feeder
from orchestrator.user_code.errors import error_text, exits_refused
from orchestrator.user_code.steering import steer_as_trained

TIMEOUT_S = 1800.0
_SAMPLES = 2
_COPIES = 2
"""Of the stored weights: one model in memory, whose numbers may be twice as wide as the stored ones."""
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""By the type of the numbers: the largest difference that rounding explains, relative to the largest number."""
_TENSORS, _NORMS, _MANIFEST, _RESULT = "trained.safetensors", "norms.json", "manifest.json", "result.json"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How the output of an export differs from that of the trained model.

    Attributes:
        error: the largest difference, relative to the largest output; None if they were not compared.
        why_not: why they were not compared; None if they were.
        fault: what is wrong with the export; None if nothing is.
        batch: what both were given.
    """

    error: float | None = None
    why_not: str | None = None
    fault: str | None = None
    batch: str = ""

    def text(self) -> str:
        """Return what a user is told of an export without a fault."""
        if self.error is None:
            return f"not compared with the trained model: {self.why_not}"
        return f"loaded again, its output is that of the trained model, for {self.batch} (difference {self.error:.1g})"


def compare(
    job: Job,
    weights: Mapping[str, Tensor],
    config_file: Path,
    export: Path,
    format: str,
    *,
    manifest: Mapping[str, Any],
    size: int,
    folder: Path,
) -> Comparison:
    """Run the trained model on one batch, and the export in another process on the same.

    Args:
        job: the job of the run.
        weights: its trained weights, read when they are asked for.
        config_file: the configuration of the run, of which the other process builds the job.
        export: the directory that ``job.export`` has written.
        format: its format.
        manifest: of the checkpoint, whose evaluations may have changed fields of the job.
        size: the bytes of the weights.
        folder: a directory for files.

    Raises:
        CheckpointError: the weights cannot be read.
    """
    if type(job).exported is Job.exported:
        return Comparison(why_not=f"{type(job).__name__} does not define Job.exported")
    if (needed := _COPIES * size) > (free := psutil.virtual_memory().available):
        return Comparison(why_not=f"that needs {needed / 1e9:.3g} GB of memory, and {free / 1e9:.3g} GB are free")
    try:
        inputs, batch = example_inputs(job)
        outputs, norms = run_trained(job, weights, inputs)
    except CheckpointError:
        raise
    except Exception as e:  # of any type: the code of the job, and its data
        return Comparison(why_not=error_text(e).partition("\n")[0])
    leaves = {f"input:{i}": leaf for i, leaf in enumerate(_tensors(inputs))}
    leaves |= {f"output:{i}": leaf for i, leaf in enumerate(outputs)}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in leaves.items()}
    save_file(plain, folder / _TENSORS)
    (folder / _NORMS).write_text(json.dumps(norms))
    (folder / _MANIFEST).write_text(json.dumps(manifest))
    del outputs, leaves, plain
    return dataclasses.replace(_in_another_process([folder, config_file, export, format]), batch=batch)


def _in_another_process(arguments: Sequence[object]) -> Comparison:
    folder = Path(str(arguments[0]))
    errors = folder / "errors"
    with errors.open("w") as stderr:  # not a pipe, which a child of the job's code may keep open
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "orchestrator.features.export.comparison", *map(str, arguments)],
                check=False,
                timeout=TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""},
            )
        except subprocess.TimeoutExpired:
            return Comparison(why_not=f"that took longer than {TIMEOUT_S:.0f} s")
    if ended.returncode < 0:
        return Comparison(why_not=f"the process that loaded it was ended by signal {-ended.returncode}")
    if ended.returncode:
        (*_, why) = errors.read_text(errors="replace").strip().splitlines() or [f"exit code {ended.returncode}"]
        return Comparison(fault=f"another process cannot load it: {why}")
    return Comparison(**json.loads((folder / _RESULT).read_text()))


def example_inputs(job: Job) -> tuple[Any, str]:
    """Return the input of a small batch, and what it is of.

    Raises:
        Exception: of any type, if the job cannot make one; the last that the code of the job has raised.
    """
    problem: Exception = ValueError(f"{type(job).__name__} has no data here")
    for split in ("val", "train"):
        try:
            seed_generators(0)
            if (dataset := data_of(job, split)) is not None:
                return split_batch(example_batch(job, dataset, _SAMPLES))[0], f"samples of {split!r}"
        except Exception as e:  # of any type: the code of the job
            problem = e
    seed_generators(0)
    if (inputs := job.example_inputs()) is None:
        raise problem
    return inputs, "an input of the right form"


def data_of(job: Job, split: str) -> Any:
    """Return the data of a split; None if there is none, or if only tasks of a cluster can read it."""
    try:
        dataset = job.dataset(split)
    except Exception as e:
        if type(e).__module__.startswith("ray."):  # which this process must not start
            return None
        raise
    return None if needs_feeder(dataset) else dataset


def example_batch(job: Job, dataset: Any, size: int) -> Any:
    """Return a batch of the first samples of a dataset, again from the first one if there are fewer.

    Raises:
        ValueError: there is no sample.
    """
    samples = list(islice(dataset, size)) if is_stream(dataset) else [dataset[i % len(dataset)] for i in range(size)]
    if not samples:
        raise ValueError("the dataset is empty")
    return (job.collate or default_collate)(samples)


def run_trained(job: Job, weights: Mapping[str, Tensor], inputs: Any) -> tuple[list[Tensor], dict[str, float]]:
    """Return the output of ``job.forward`` with trained weights in evaluation mode, as its tensors; and norms.

    The norms are those of the first output of each module, by its name and in the order of the calls.
    """
    seed_generators(0)
    model = job.model()
    with torch.no_grad():
        for name, own in own_tensors(model).items():
            own.copy_(weights[name])
    return _run(job, model, inputs)


def _run(job: Job, model: nn.Module, inputs: Any, *, seed: int = 0) -> tuple[list[Tensor], dict[str, float]]:
    norms: dict[str, float] = {}

    def remember(name: str, output: Any) -> None:
        if name not in norms and (found := [t for t in _tensors(output) if t.is_floating_point()]):
            norms[name] = float(torch.linalg.vector_norm(found[0].float()))

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: remember(name, output))
        for name, module in model.eval().named_modules()
        if name and not isinstance(module, torch.jit.ScriptModule)
    ]
    seed_generators(seed)
    try:
        with torch.no_grad():
            return list(_tensors(job.forward(model, inputs))), norms
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def main(folder: Path, config_file: Path, export: Path, format: str) -> Comparison:
    """Load the export and compare its output with the one in the folder."""
    job = job_to_export(config_file, format)
    steer_as_trained(job, json.loads((folder / _MANIFEST).read_text()))
    norms, stored = json.loads((folder / _NORMS).read_text()), load_file(folder / _TENSORS)
    inputs, outputs = (
        [stored[name] for name in sorted(stored, key=_number) if name.startswith(kind)] for kind in ("input", "output")
    )
    given = _with_tensors(example_inputs(job)[0], inputs)
    model = job.exported(export, format)
    if model is None:
        return Comparison(why_not=f"{type(job).__name__} cannot load it")
    found, theirs = _run(job, model, given)
    if (fault := _other_form(found, outputs)) is not None:
        return Comparison(fault=fault)
    numbers = [t.dtype for t in (*model.parameters(), *outputs) if t.dtype in LIMITS]
    limit = max((LIMITS[dtype] for dtype in numbers), default=0.0)
    error = difference(found, outputs)
    if error <= limit:
        return Comparison(error=error)
    if difference(found, _run(job, model, given, seed=1)[0]) > limit:
        return Comparison(why_not="its output is random in evaluation mode")
    return Comparison(fault=f"{said(error, limit)}{_first_module(theirs, norms, limit)}")


def said(error: float, limit: float) -> str:
    """Return in words that outputs differ."""
    if math.isinf(error):
        return "its output has other numbers that are zero or not finite than that of the trained model"
    return (
        f"its output differs from that of the trained model by {error:.2g} of the largest number, and rounding "
        f"explains {limit:g}"
    )


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of two outputs, relative to the largest number in the same tensor."""
    errors = [0.0]
    for ours, theirs in zip(found, expected, strict=True):
        ours, theirs = (t.double() if t.dtype == torch.float64 else t.float() for t in (ours, theirs))
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        apart = torch.where(same, 0.0, (ours - theirs).abs())
        largest = float(torch.where(theirs.isfinite(), theirs, 0.0).abs().max()) if theirs.numel() else 0.0
        worst = float(apart.max()) if apart.numel() else 0.0
        errors.append(worst / largest if largest else math.inf if worst else 0.0)
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def _other_form(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    ours, theirs = ([list(tensor.shape) for tensor in each] for each in (found, expected))
    return None if ours == theirs else f"its output has the shapes {ours}, and that of the trained model {theirs}"


def _first_module(found: Mapping[str, float], trained: Mapping[str, float], limit: float) -> str:
    """Name the first module whose output differs, as far as both models have it.

    The trained one may have more levels, as with adapters.
    """
    for name, norm in found.items():
        parts = name.split(".")
        alike = [other for other in trained if other.split(".")[-1] == parts[-1] and _in_order(parts, other.split("."))]
        if alike and abs(norm - trained[min(alike, key=len)]) > limit * norm:
            return f"; the first module that differs is {name}"
    return ""


def _in_order(parts: Sequence[str], longer: Sequence[str]) -> bool:
    rest = iter(longer)
    return all(part in rest for part in parts)


def _number(name: str) -> int:
    return int(name.rpartition(":")[2])


def _with_tensors(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """Return ``tree`` with other tensors: what a dataset draws may differ from process to process."""
    leaves, structure = pytree.tree_flatten(tree)
    others = iter(tensors)
    return pytree.tree_unflatten([next(others) if isinstance(x, Tensor) else x for x in leaves], structure)


if __name__ == "__main__":
    (where, config, exported), kind = map(Path, sys.argv[1:4]), sys.argv[4]
    try:
        with exits_refused():
            compared = main(where, config, exported, kind)
    except ModuleNotFoundError as e:
        compared = Comparison(why_not=str(e))
    except Exception as e:  # of any type: the code of the job, and of the library that loads
        compared = Comparison(fault=f"another process cannot run it: {' '.join(error_text(e).split())[:500]}")
    (where / _RESULT).write_text(json.dumps(dataclasses.asdict(compared)))
    sys.stdout.flush()
    os._exit(0)  # threads of a dataset must not keep this process
