"""Values of another dtype than that of their parameter, which ``Optimizer.load_state_dict`` would cast to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.compat.torch import pytree


def load_without_casts(
    optimizer: Optimizer,
    said: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Let ``optimizer`` load a state, whose values keep their dtypes where the parameter has its own as well.

    torch takes text for a sequence, which is put back too.

    Args:
        optimizer: its state is replaced.
        said: as ``state_dict()`` returns it.
        parameters: those of the optimizer, by saved name, in the order of their numbers in ``said``.
        dtypes: of the saved parameters, by name.
    """
    saved: Mapping[Any, Any] = said.get("state", {})
    numbered = dict(enumerate(parameters.items()))
    keeping = {number: p for number, (name, p) in numbered.items() if dtypes.get(name) == p.dtype}
    given = dict(said)
    if saved and type(optimizer).load_state_dict is Optimizer.load_state_dict:
        given["state"] = {n: _spared(values, keeping[n]) if n in keeping else values for n, values in saved.items()}
    optimizer.load_state_dict(given)
    for number, (_, parameter) in numbered.items():
        loaded = optimizer.state.get(parameter, {})
        for key, value in saved.get(number, {}).items():
            now = loaded.get(key)
            is_cast = now.dtype != value.dtype if isinstance(now, Tensor) else isinstance(now, (list, tuple, dict))
            if type(now) is type(value) and (isinstance(now, str) or (is_cast and number in keeping)):
                loaded[key] = value


def _spared(values: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Return the state of a parameter with empty tensors in place of those that torch would cast for nothing.

    For casts of all of them at once, a GPU may have no room.
    """

    def spared(value: Any) -> Any:
        is_tensor = isinstance(value, Tensor) and value.layout == torch.strided
        is_cast = is_tensor and value.dtype != parameter.dtype and parameter.is_floating_point()
        return value.new_empty(0) if is_cast else value

    return {key: value if key == "step" else pytree.tree_map(spared, value) for key, value in values.items()}
