"""Which shard of each parameter lies on which server.

Parameters with dense gradients are cut at any element. Their shards travel whole, so that a worker keeps all of them in
one contiguous memory, in which the shards of a server follow each other. Tables with sparse gradients are cut between
rows, and only touched rows travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from orchestrator.model.parameter_division import PER_PARAMETER, Extent, Shard, cut, offsets
from orchestrator.state.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class PlacedShard(Shard):
    """A shard of a parameter on one server; its units are elements, or the rows of a table.

    Attributes:
        begin: the first byte in the contiguous memory of all dense parameters; 0 for a table.
        end: the end in that memory; 0 for a table.
        row: the shape of a row of a table; None for a dense parameter.
    """

    dtype: torch.dtype
    begin: int = 0
    end: int = 0
    row: torch.Size | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return this shard of a tensor of the parameter's shape: rows of a table, otherwise a flat tensor."""
        return (tensor.reshape(-1) if self.row is None else tensor)[self.start : self.stop]


def shards_of(
    extents: Sequence[Extent], parameters: Mapping[str, Tensor], num_servers: int
) -> tuple[tuple[PlacedShard, ...], ...]:
    """Return the shards of each server.

    Raises:
        ValueError: there are more servers than elements in the parameters.
    """
    first_byte, extent_of = offsets(extents), {e.name: e for e in extents}

    def placed(shard: Shard) -> PlacedShard:
        parameter, extent = parameters[shard.name], extent_of[shard.name]
        place = PlacedShard(name=shard.name, start=shard.start, stop=shard.stop, dtype=parameter.dtype)
        if extent.by_rows:
            return replace(place, row=parameter.shape[1:])
        begin, end = (first_byte[shard.name] + unit * extent.unit_bytes for unit in (shard.start, shard.stop))
        return replace(place, begin=begin, end=end)

    return tuple(tuple(map(placed, shards)) for shards in cut(extents, num_servers))


def dense_bytes(shards: Sequence[PlacedShard]) -> slice:
    """Return the bytes of a server's ``shards`` in the contiguous memory of all dense parameters."""
    dense = [shard for shard in shards if shard.row is None]
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
    states: Sequence[Mapping[str, Tensor]], shapes: Mapping[str, torch.Size], *, into: TrainState | None
) -> dict[str, Tensor]:
    """Join the servers' optimizer states into the state of whole parameters.

    Args:
        states: the state on each server, under ``"<parameter name>/<state key>"``.
        shapes: the shape of each parameter.
        into: an old state whose memory may be reused.

    Returns:
        The joined state, under the same names.
    """
    whole: dict[str, Tensor] = {}
    for path in dict.fromkeys(path for state in states for path in state):
        name, _, key = path.rpartition("/")
        tensors = [state[path] for state in states if path in state]
        if key in PER_PARAMETER:
            whole[path] = tensors[0]
            continue
        old = None if into is None else into.optimizer.get(path)
        fits = old is not None and old.shape == shapes[name] and old.dtype == tensors[0].dtype
        memory = old if fits and old is not None else torch.empty(shapes[name], dtype=tensors[0].dtype)
        torch.cat([t.reshape(-1) for t in tensors], out=memory.view(-1))
        whole[path] = memory
    return whole
