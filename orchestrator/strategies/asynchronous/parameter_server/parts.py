"""Which part of each parameter lies on which shard.

Parameters with dense gradients are cut at any element. Their parts travel whole, so that a worker keeps all of them in
one contiguous memory, in which the parts of a shard follow each other. Tables with sparse gradients are cut between
rows, and only touched rows travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from orchestrator.model.sharding import PER_PARAMETER, Extent, cut, offsets
from orchestrator.state.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a parameter on one shard.

    Attributes:
        name: the parameter's name.
        start: the first element, or the first row of a table.
        stop: the end of the elements or rows.
        dtype: the parameter's dtype.
        begin: the first byte in the contiguous memory of all dense parameters; 0 for a table.
        end: the end in that memory; 0 for a table.
        row: the shape of a row of a table; None for a dense parameter.
    """

    name: str
    start: int
    stop: int
    dtype: torch.dtype
    begin: int = 0
    end: int = 0
    row: torch.Size | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of a tensor of the parameter's shape: rows of a table, otherwise a flat tensor."""
        return (tensor.reshape(-1) if self.row is None else tensor)[self.start : self.stop]


def parts_of(
    extents: Sequence[Extent], parameters: Mapping[str, Tensor], num_shards: int
) -> tuple[tuple[Part, ...], ...]:
    """Return the parts of each shard.

    Raises:
        ValueError: there are more shards than elements in the parameters.
    """
    first_byte, extent_of = offsets(extents), {e.name: e for e in extents}

    def part(name: str, start: int, stop: int) -> Part:
        parameter, extent = parameters[name], extent_of[name]
        if extent.by_rows:
            return Part(name=name, start=start, stop=stop, dtype=parameter.dtype, row=parameter.shape[1:])
        begin, end = (first_byte[name] + unit * extent.unit_bytes for unit in (start, stop))
        return Part(name=name, start=start, stop=stop, dtype=parameter.dtype, begin=begin, end=end)

    return tuple(tuple(part(p.name, p.start, p.stop) for p in pieces) for pieces in cut(extents, num_shards))


def dense_bytes(parts: Sequence[Part]) -> slice:
    """Return the bytes of a shard in the contiguous memory of all dense parameters."""
    dense = [part for part in parts if part.row is None]
    return slice(dense[0].begin, dense[-1].end) if dense else slice(0, 0)


def make_contiguous(parameters: Mapping[str, nn.Parameter], extents: Sequence[Extent]) -> Tensor:
    """Move all dense parameters into one contiguous memory, so that a pull is received in place.

    Returns:
        The memory as bytes, of shape (n,).
    """
    starts = offsets(extents)
    device = next(iter(parameters.values())).device
    end = max((starts[e.name] + e.size_bytes for e in extents if e.name in starts), default=0)
    memory = torch.zeros(end, dtype=torch.uint8, device=device)
    for name, start in starts.items():
        parameter = parameters[name]
        place = memory[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        parameter.data = place.copy_(parameter.detach())
    return memory


def join_optimizer_state(
    parts: Sequence[Mapping[str, Tensor]], shapes: Mapping[str, torch.Size], *, into: TrainState | None
) -> dict[str, Tensor]:
    """Join the shards' optimizer states into the state of whole parameters.

    Args:
        parts: the state on each shard, under ``"<parameter name>/<state key>"``.
        shapes: the shape of each parameter.
        into: an old state whose memory may be reused.

    Returns:
        The joined state, under the same names.
    """
    whole: dict[str, Tensor] = {}
    for path in dict.fromkeys(path for part in parts for path in part):
        name, _, key = path.rpartition("/")
        tensors = [part[path] for part in parts if path in part]
        if key in PER_PARAMETER:
            whole[path] = tensors[0]
            continue
        old = None if into is None else into.optimizer.get(path)
        fits = old is not None and old.shape == shapes[name] and old.dtype == tensors[0].dtype
        memory = old if fits and old is not None else torch.empty(shapes[name], dtype=tensors[0].dtype)
        torch.cat([t.reshape(-1) for t in tensors], out=memory.view(-1))
        whole[path] = memory
    return whole
