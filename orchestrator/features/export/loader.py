"""Load an exported model in MLflow. This file is part of every uploaded model and needs none of the code that built it.

``artifacts``: ``program``, a graph of ``torch.export`` that takes weights and inputs; ``weights``, in safetensors.
"""

from __future__ import annotations

from typing import Any

import mlflow
import numpy as np
import torch
from safetensors.torch import load_file


class ExportedModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc, name-defined]
    """Predicts on the CPU: NumPy arrays, or a dict of them, whose first dimension is the sample."""

    def load_context(self, context: Any) -> None:
        """Read the graph and the weights."""
        self._program = torch.export.load(context.artifacts["program"]).module()
        self._weights = load_file(context.artifacts["weights"])

    # MLflow takes annotations for a schema of the input, and has one already.
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        """Return the model's output for a batch, as arrays."""
        with torch.no_grad():
            output = self._program(self._weights, _map(model_input, _tensor))
        return _map(output, lambda tensor: tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy())


def _map(tree: Any, function: Any) -> Any:
    return {name: function(value) for name, value in tree.items()} if isinstance(tree, dict) else function(tree)


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


mlflow.models.set_model(ExportedModel())
