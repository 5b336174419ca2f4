"""A model that a proof calls again and again, whole and as parts: with random weights, or as training begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from orchestrator.model.partial_init import build_fake, build_part
from orchestrator.model.proving import built_at_random
from orchestrator.model.repeated_blocks import blocks_of
from orchestrator.model.tensor_slots import tensor_slots

MOST_PRECISE = 2**27
"""The number of elements up to which parameters are in float64."""


@dataclass(frozen=True)
class ProvenModel:
    """A model on the CPU.

    Attributes:
        build: its constructor.
        values: the values of its tensors, by the names of their slots. Those of parameters are shared by all instances.
        dtype: that of its floating-point tensors.
    """

    build: Callable[[], nn.Module]
    values: Mapping[str, Tensor]
    dtype: torch.dtype

    @classmethod
    def random(cls, build: Callable[[], nn.Module], *, dtype: torch.dtype, shares: bool = False) -> ProvenModel:
        """Return a model with random weights; ``shares``: blocks that have the same shapes have the same weights."""
        fake = build_fake(build, torch.device("cpu")).model
        of_others = _same_shapes(fake) if shares else {}
        model = built_at_random(build, lambda name: name not in of_others)
        values = {slot.name: slot.tensor for slot in tensor_slots(model) if slot.name not in of_others}
        return cls._of(build, {**values, **{name: values[other] for name, other in of_others.items()}}, dtype)

    @classmethod
    def initial(cls, build: Callable[[], nn.Module], *, seed: int, dtype: torch.dtype) -> ProvenModel:
        """Return the model as it is before the first step."""
        model = build_part(build, lambda name: True, seed=seed)
        return cls._of(build, {slot.name: slot.tensor for slot in tensor_slots(model)}, dtype)

    @classmethod
    def _of(cls, build: Callable[[], nn.Module], values: Mapping[str, Tensor], dtype: torch.dtype) -> ProvenModel:
        own: dict[int, Tensor] = {}
        for tensor in values.values():
            value = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
            is_parameter = isinstance(tensor, nn.Parameter)
            own[id(tensor)] = nn.Parameter(value, requires_grad=value.is_floating_point()) if is_parameter else value
        return cls(build, {name: own[id(tensor)] for name, tensor in values.items()}, dtype)

    def model(self) -> nn.Module:
        """Return an instance. It has its own buffers and attributes, and the common parameters."""
        model = built_at_random(self.build, lambda name: False)
        slots = list(tensor_slots(model))
        own: dict[int, Tensor] = {}
        for slot in slots:
            value = self.values[slot.name]
            own.setdefault(id(slot.tensor), value if isinstance(value, nn.Parameter) else value.clone())
        for slot in slots:
            slot.fill(own)
        return model

    @torch.no_grad()
    def multiply(self, factor: float) -> None:
        """Multiply all matrices by a number."""
        for parameter in {
            id(value): value for value in self.values.values() if isinstance(value, nn.Parameter)
        }.values():
            if factor != 1 and parameter.ndim > 1:
                parameter.mul_(factor)


def _same_shapes(model: nn.Module) -> dict[str, str]:
    """Return the names of the parameters of blocks, and of those of the first block that has such parameters."""
    names = {module: name for name, module in model.named_modules()}
    first: dict[object, str] = {}
    found: dict[str, str] = {}
    for block in blocks_of(model):
        named = list(block.named_parameters())
        key = type(block), *((name, p.shape, p.dtype) for name, p in named)
        other = first.setdefault(key, names[block])
        if other != names[block]:
            found |= {f"{names[block]}.{name}": f"{other}.{name}" for name, _ in named}
    return found
