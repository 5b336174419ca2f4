"""Optimizers as a checkpoint has them: several as one, shards of their state, loading without casts, values as JSON."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from orchestrator.compat.torch import pytree
from orchestrator.state.schedule import Schedule


class JointOptimizer:
    """The parameter groups and the state of several ``optimizers``, which have no parameter in common."""

    def __init__(self, optimizers: Sequence[Optimizer]):
        self.optimizers = optimizers

    @property
    def label(self) -> str:
        """The names of their classes, as in ``Adam+SGD``."""
        return "+".join(type(optimizer).__name__ for optimizer in self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the first optimizer, then of the next."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of each parameter."""
        return {parameter: values for optimizer in self.optimizers for parameter, values in optimizer.state.items()}


AnyOptimizer = Optimizer | JointOptimizer
AnyScheduler = LRScheduler | Schedule


def label_of(value: AnyOptimizer | AnyScheduler) -> str:
    """Return the name of the class that a checkpoint records, and that the one which loads it must have."""
    return value.label if isinstance(value, (JointOptimizer, Schedule)) else type(value).__name__


class Shard(Tensor):
    """This rank's part of a tensor that has the shape of the whole parameter.

    The type says so, because the shape cannot: the matrix that belongs to the rows of a parameter may have the shape of
    its shard. Copies of a shard are of this type too.
    """


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


def to_json(value: Any, what: str, remedy: str) -> Any:
    """Convert ``value`` to JSON types. A mapping with keys other than text becomes a list of pairs.

    Args:
        value: numbers, text, tensors and NumPy arrays in nested lists, tuples and mappings.
        what: the owner of the value, the subject of the error message.
        remedy: what the user can do about an error.

    Raises:
        ValueError: the value holds something that JSON cannot represent.
    """
    if hasattr(value, "tolist"):  # tensors, NumPy arrays and NumPy scalars
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        items = [(to_json(k, what, remedy), to_json(v, what, remedy)) for k, v in value.items()]
        return dict(items) if all(isinstance(k, str) for k in value) else [list(i) for i in items]
    if isinstance(value, (list, tuple)):
        return [to_json(v, what, remedy) for v in value]
    raise ValueError(f"{what} holds a {type(value).__name__}, which JSON cannot represent; {remedy}")


def from_json(value: Any, template: Any) -> Any:
    """Convert ``value`` from JSON, taking the types of containers and tensors from ``template``, a similar value."""
    if isinstance(template, Tensor):
        return torch.tensor(value, dtype=template.dtype, device=template.device)
    if isinstance(template, Mapping):
        pairs = value.items() if isinstance(value, dict) else value
        result = copy.copy(cast("dict[Any, Any]", template))
        result.clear()
        result.update({k: from_json(v, template.get(k)) for k, v in pairs})
        return result
    if isinstance(value, list):
        inner: Iterable[Any] = [None] * len(value)
        if isinstance(template, (list, tuple)) and len(template) == len(value):
            inner = template
        items = [from_json(v, t) for t, v in zip(inner, value, strict=True)]
        return tuple(items) if isinstance(template, tuple) else items
    return copy.copy(value)
