"""The parameters of a model cut into shards of nearly the same number of bytes, each with its part of the optimizer."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

ELEMENT_WISE: frozenset[type[Optimizer]] = frozenset(
    {SGD, Adagrad, Adam, AdamW, Adadelta, Adamax, NAdam, RAdam, RMSprop}
)
"""Optimizers that treat each number of a parameter by itself, so that parts of it are updated as the whole would be."""

PER_PARAMETER = frozenset({"step", "mu_product"})
"""State of which their parameters have one number each, whatever their size."""

ALIGNMENT_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A parameter as it can be cut: ``units`` of ``unit_bytes`` each.

    They are its numbers, or with ``by_rows`` its rows, for gradients that touch few of them.
    """

    name: str
    units: int
    unit_bytes: int
    by_rows: bool = False

    @property
    def size_bytes(self) -> int:
        return self.units * self.unit_bytes


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The units ``start`` to ``stop`` of a parameter."""

    name: str
    start: int
    stop: int


def cut(extents: Sequence[Extent], num_shards: int) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each shard, which follow each other as the parameters do.

    Shards differ by a unit, and each has at least one; a parameter has at most one piece in a shard.

    Raises:
        ValueError: there are fewer units than shards.
    """
    first_unit = list(itertools.accumulate((e.units for e in extents), initial=0))
    first_byte = list(itertools.accumulate((e.size_bytes for e in extents), initial=0))
    units, size_bytes = first_unit[-1], first_byte[-1]
    if num_shards > units:
        raise ValueError(f"{num_shards} shards of {units} parts")
    bounds = [0]
    for shard in range(1, num_shards):
        byte = size_bytes * shard // num_shards
        number = bisect_right(first_byte, byte) - 1
        unit_bytes = extents[number].unit_bytes
        nearest = first_unit[number] + (byte - first_byte[number] + unit_bytes // 2) // unit_bytes
        bounds.append(min(max(nearest, bounds[-1] + 1), units - (num_shards - shard)))
    bounds.append(units)
    return tuple(
        tuple(
            Piece(name=extent.name, start=max(begin, first) - first, stop=min(end, first + extent.units) - first)
            for extent, first in zip(extents, first_unit, strict=False)
            if max(begin, first) < min(end, first + extent.units)
        )
        for begin, end in itertools.pairwise(bounds)
    )


def offsets(extents: Sequence[Extent]) -> dict[str, int]:
    """Where each parameter that is cut anywhere begins in one memory of all of them, in bytes."""
    found: dict[str, int] = {}
    end = 0
    for extent in extents:
        if not extent.by_rows:
            found[extent.name] = end
            end += -(-extent.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return found


def extents_of(model: nn.Module) -> tuple[Extent, ...]:
    """The parameters that are trained; tables whose gradients are sparse are cut between rows."""
    tables = {
        module.weight
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
    return tuple(
        Extent(
            name=name,
            units=len(parameter) if parameter in tables else parameter.numel(),
            unit_bytes=parameter.nbytes // max(1, len(parameter)) if parameter in tables else parameter.element_size(),
            by_rows=parameter in tables,
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )


def optimizer_error(optimizer: Optimizer) -> str | None:
    """Why shards could not own their parts of it; None: they can."""
    if type(optimizer) in ELEMENT_WISE:
        return None
    return (
        f"{type(optimizer).__name__}: shards update their pieces of a parameter by themselves, and this optimizer may "
        "look at the whole of it; use SGD, Adagrad, Adam or AdamW, or strategy=ddp"
    )


def touches_rows_alone(optimizer: Optimizer, group: dict[str, object]) -> bool:
    """Whether a row without a gradient stays as it is."""
    if isinstance(optimizer, SGD):
        return not group["momentum"] and not group["weight_decay"]
    return isinstance(optimizer, Adagrad) and not group["weight_decay"]


def wire_dtype(dtype: torch.dtype, compression: str) -> torch.dtype:
    """In what a gradient of this type travels."""
    return torch.bfloat16 if compression == "bf16" and dtype in (torch.float32, torch.float64) else dtype
