"""What proofs of divided models have in common: random weights, and how far what is computed may be apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import drawing
from orchestrator.compat.torch import FakeTensor
from orchestrator.model.partial_init import build_divided
from orchestrator.model.tensor_slots import tensor_slots

TOLERANCE = 1e-5
"""How much a tensor may differ, relative to its largest entry, where a wrong division differs by 1e-2 and more."""
NEGLIGIBLE = 1e-7
"""The same, relative to the largest entry of any gradient: that of a key's bias is nothing but rounding."""


def difference(found: Tensor | None, wanted: Tensor | None, scale: float = 0.0) -> float:
    """Return the largest difference of two tensors, relative to the largest entry of ``wanted``.

    Infinite for other shapes, for one that is missing, and for what is no number.

    Args:
        found, wanted: the tensors.
        scale: the largest entry of what is compared beside them.
    """
    if found is None or wanted is None:
        return 0.0 if found is wanted else float("inf")
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    largest = max(float(wanted.abs().max()), scale * NEGLIGIBLE / TOLERANCE)
    apart = float((found - wanted).abs().max())
    relative = apart / largest if largest else apart
    return relative if relative == relative else float("inf")


def counted(output: Tensor) -> Tensor:
    """Return what each entry of an output counts in a sum, so that all have different gradients."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)


def built_at_random(build: Callable[[], nn.Module], wanted: Callable[[str], bool]) -> nn.Module:
    """Return a model on the CPU with random weights, none of which is zero, and all of which count.

    Args:
        build: the constructor. Buffers are as it leaves them.
        wanted: whether the tensor of a name is wanted. Other parameters have no elements.
    """
    model, _ = build_divided(build, lambda shape: (), seed=0, device=torch.device("cpu"), wanted=wanted, draws_as=0)
    slots = [slot for slot in tensor_slots(model) if isinstance(slot.tensor, FakeTensor)]
    needed = {id(slot.tensor) for slot in slots if wanted(slot.name)}
    values: dict[int, Tensor] = {}
    with drawing(0):
        for slot in slots:
            if (key := id(slot.tensor)) not in values:
                values[key] = _random(slot.tensor) if key in needed else torch.zeros(0, dtype=slot.tensor.dtype)
    for slot in slots:
        slot.fill(values)
    return model


def _random(fake: Tensor) -> Tensor:
    values = torch.randn(fake.shape, dtype=torch.float32)
    values = values.div(max(fake.shape[-2:]) ** 0.5) if fake.ndim > 1 else 1 + 0.2 * values
    return values.to(fake.dtype)
