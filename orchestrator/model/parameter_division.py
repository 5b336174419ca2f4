"""A model's parameters divided over servers by size, each server with an optimizer of its own."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

ELEMENT_WISE: frozenset[type[Optimizer]] = frozenset(
    {SGD, Adagrad, Adam, AdamW, Adadelta, Adamax, NAdam, RAdam, RMSprop}
)
"""Optimizers that update each element of a parameter independently, so that a shard is updated as in the whole."""

PER_PARAMETER = frozenset({"step", "mu_product"})
"""Keys of optimizer state that is one number per parameter, whatever the parameter's size."""

ALIGNMENT_BYTES = 16
"""The alignment of each parameter in the memory that :func:`offsets` describes."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A parameter and the units between which it can be cut.

    Attributes:
        name: the parameter.
        units: the number of its units.
        unit_bytes: the size of a unit.
        by_rows: whether a unit is a row and not an element. Parameters with sparse gradients are cut by rows.
    """

    name: str
    units: int
    unit_bytes: int
    by_rows: bool = False

    @property
    def size_bytes(self) -> int:
        """The size of the parameter."""
        return self.units * self.unit_bytes


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A part of a parameter: the units from ``start`` up to but excluding ``stop``."""

    name: str
    start: int
    stop: int


def cut(extents: Sequence[Extent], num_servers: int) -> tuple[tuple[Shard, ...], ...]:
    """Divide parameters over servers, by sizes that differ by at most about one unit.

    Args:
        extents: the parameters in the model's order.
        num_servers: the number of servers.

    Returns:
        The shards of each server, in the order of the parameters. A server has at least one unit, and at most one
        shard of each parameter.

    Raises:
        ValueError: there are fewer units than servers.
    """
    first_unit = list(itertools.accumulate((e.units for e in extents), initial=0))
    first_byte = list(itertools.accumulate((e.size_bytes for e in extents), initial=0))
    units, size_bytes = first_unit[-1], first_byte[-1]
    if num_servers > units:
        raise ValueError(f"{num_servers} servers need at least as many units; the parameters have {units}")
    bounds = [0]
    for server in range(1, num_servers):
        byte = size_bytes * server // num_servers
        number = bisect_right(first_byte, byte) - 1
        unit_bytes = extents[number].unit_bytes
        nearest = first_unit[number] + (byte - first_byte[number] + unit_bytes // 2) // unit_bytes
        bounds.append(min(max(nearest, bounds[-1] + 1), units - (num_servers - server)))
    bounds.append(units)
    return tuple(
        tuple(
            Shard(name=extent.name, start=max(begin, first) - first, stop=min(end, first + extent.units) - first)
            for extent, first in zip(extents, first_unit, strict=False)
            if max(begin, first) < min(end, first + extent.units)
        )
        for begin, end in itertools.pairwise(bounds)
    )


def offsets(extents: Sequence[Extent]) -> dict[str, int]:
    """Return the byte offset of each parameter in one buffer that holds all parameters but those cut by rows."""
    starts: dict[str, int] = {}
    end = 0
    for extent in extents:
        if not extent.by_rows:
            starts[extent.name] = end
            end += -(-extent.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return starts


def extents_of(model: nn.Module) -> tuple[Extent, ...]:
    """Return the extents of the trained parameters. Embeddings with sparse gradients are cut by rows."""
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
    """Return why servers cannot update their shards independently with ``optimizer``; None if they can."""
    if type(optimizer) in ELEMENT_WISE:
        return None
    return (
        f"{type(optimizer).__name__}: servers update their shards of a parameter independently, and this optimizer may "
        "need the whole parameter; use SGD, Adagrad, Adam or AdamW, or strategy=ddp"
    )


def touches_rows_alone(optimizer: Optimizer, group: dict[str, object]) -> bool:
    """Return whether the optimizer leaves rows without a gradient unchanged; ``group`` is the parameter group."""
    if isinstance(optimizer, SGD):
        return not group["momentum"] and not group["weight_decay"]
    return isinstance(optimizer, Adagrad) and not group["weight_decay"]
