"""A trained model as a program that runs without the code that built it: a graph of ``torch.export``, and its weights.

The graph takes the weights as an argument, so that its file has none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.job import Job

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
