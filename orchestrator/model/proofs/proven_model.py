"""A model that a proof calls again and again, whole and as parts: with random weights, or as training begins."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.modules import hooks_of
from orchestrator.model.batch import map_leaves, tensors_in
from orchestrator.model.partial_init import build_fake, build_part
from orchestrator.model.proofs.proving import built_at_random
from orchestrator.model.tensor_slots import tensor_slots

MOST_PRECISE = 2**27
"""The number of elements up to which parameters are in float64."""
TENSOR = object()
"""Stands for a tensor."""


@dataclass(frozen=True)
class ProvenModel:
    """A model on the CPU.

    Attributes:
        build: its constructor.
        first: an instance that is not called.
        dtype: that of its floating-point tensors.
        skipped: for each block that passes on its arguments, its own result, with ``None`` for tensors.
    """

    build: Callable[[], nn.Module]
    first: nn.Module
    dtype: torch.dtype
    skipped: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def random(
        cls, build: Callable[[], nn.Module], *, dtype: torch.dtype, skipped: Mapping[str, Any] | None = None
    ) -> ProvenModel:
        """Return a model with random weights; the blocks that are ``skipped`` have none."""
        skipped = skipped or {}
        slots = list(tensor_slots(build_fake(build, torch.device("cpu")).model)) if skipped else []
        outside = {id(slot.tensor) for slot in slots if not any(slot.name.startswith(f"{name}.") for name in skipped)}
        left_out = {slot.name for slot in slots if id(slot.tensor) not in outside}
        model = built_at_random(build, lambda name: name not in left_out)
        return cls(build, _converted(model, dtype), dtype, skipped)

    @classmethod
    def initial(cls, build: Callable[[], nn.Module], *, seed: int, dtype: torch.dtype) -> ProvenModel:
        """Return the model as it is before the first step."""
        return cls(build, _converted(build_part(build, lambda name: True, seed=seed), dtype), dtype)

    def model(self) -> nn.Module:
        """Return an instance. It has its own buffers and attributes, and the common parameters."""
        common = {id(parameter): parameter for parameter in self.first.parameters()}
        if not _has_functions(self.first):
            return self._skipping(copy.deepcopy(self.first, common))
        model = built_at_random(self.build, lambda name: False)
        values = {slot.name: slot.tensor for slot in tensor_slots(self.first)}
        own: dict[int, Tensor] = {}
        for slot in (slots := list(tensor_slots(model))):
            value = values[slot.name]
            own.setdefault(id(slot.tensor), value if id(value) in common else value.clone())
        for slot in slots:
            slot.fill(own)
        return self._skipping(model)

    def _skipping(self, model: nn.Module) -> nn.Module:
        for name, template in self.skipped.items():
            vars(model.get_submodule(name))["forward"] = functools.partial(_passed_on, template)
        return model

    @torch.no_grad()
    def multiply(self, factor: float) -> None:
        """Multiply all matrices by a number."""
        for parameter in self.first.parameters():
            if factor != 1 and parameter.ndim > 1:
                parameter.mul_(factor)


def _converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a model whose tensors have a type, and whose parameters get gradients."""
    own: dict[int, Tensor] = {}
    for slot in (slots := list(tensor_slots(model))):
        value = slot.tensor.detach()
        value = value.to(dtype) if value.is_floating_point() else value
        is_parameter = isinstance(slot.tensor, nn.Parameter)
        made = nn.Parameter(value, requires_grad=value.is_floating_point()) if is_parameter else value
        own.setdefault(id(slot.tensor), made)
    for slot in slots:
        slot.fill(own)
    return model


def _has_functions(model: nn.Module) -> bool:
    """Return whether a model has functions that may refer to its modules, which a copy of it would then share."""
    return any(
        hooks_of(module)
        or any(inspect.isfunction(value) and value.__closure__ for value in vars(module).values())
        or any(isinstance(value, functools.partial) for value in vars(module).values())
        for module in model.modules()
    )


def _passed_on(template: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a tree like ``template``, whose first tensor is the first one that is given."""
    given = iter(tensors_in((args, kwargs))[:1])
    return map_leaves(lambda leaf: next(given, None) if leaf is TENSOR else leaf, template)


def alike_between(blocks: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of blocks, each between two that compute alike, with the same code and plain attributes."""
    kinds: dict[Hashable, list[str]] = {}
    for name, block in blocks.items():
        number = next((int(step) for step in reversed(name.split(".")) if step.isdecimal()), None)
        attributes = [
            (path, attribute, None if value == number and type(value) is int else value)
            for path, module in block.named_modules()
            for attribute, value in vars(module).items()
            if isinstance(value, (bool, int, float, str))
        ]
        shapes = [(path, tensor.shape) for path, tensor in (*block.named_parameters(), *block.named_buffers())]
        classes = [type(module) for module in block.modules()]
        kinds.setdefault((repr(block), *classes, *shapes, *attributes), []).append(name)
    return [name for names in kinds.values() for name in names[1:-1]]
