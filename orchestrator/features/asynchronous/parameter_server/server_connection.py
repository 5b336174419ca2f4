"""A worker's connection to one server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.features.asynchronous.parameter_server import wire
from orchestrator.features.asynchronous.parameter_server.placed_shards import PlacedShard, dense_bytes
from orchestrator.state.transport import CPU


class ServerConnection:
    """Pushes gradients to one server and receives its parameters as the answer.

    Attributes:
        sends: the messages being sent to the server.
        received_bytes: the size of the answers received since the last :meth:`reset_counters`.
    """

    def __init__(
        self,
        rank: int,
        shards: Sequence[PlacedShard],
        parameters: Mapping[str, Tensor],
        memory: Tensor,
        pushes: dist.ProcessGroup | None,
    ):
        """Allocate the buffers.

        Args:
            rank: the server's global rank.
            shards: the shards of parameters that the server has.
            parameters: the worker's parameters by name.
            memory: the contiguous memory of all dense parameters, as bytes.
            pushes: the group for pushes; None for the default one.
        """
        self.rank = rank
        self._pushes = pushes
        self.sends = wire.PendingSends()
        self.received_bytes = 0
        self._names = [shard.name for shard in shards]
        self._push = wire.Push(shards)
        self._dense = memory[dense_bytes(shards)]
        self._dense_elements = sum(shard.stop - shard.start for shard in shards if shard.row is None)
        self._tables = {
            shard.name: (shard, shard.of(parameters[shard.name].detach())) for shard in shards if shard.row is not None
        }
        self._landing = (
            self._dense if memory.device == CPU else torch.empty_like(self._dense, device=CPU, pin_memory=True)
        )
        self._counts = torch.zeros(len(self._tables), dtype=torch.int64)
        self._receiving: list[dist.Work] = []
        self._answer_group: dist.ProcessGroup | None = None
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        self._push.clear()
        self._missing = set(self._names)
        self._pushed = False

    def put(self, name: str, gradient: Tensor) -> None:
        """Add a gradient to the push, and send the push when it is complete.

        Raises:
            ValueError: the push has already been sent.
        """
        if self._pushed:
            raise ValueError(
                f"the gradient of {name} changed after it had been sent to its server; if activations are "
                "checkpointed, pass use_reentrant=False to checkpoint(), or use strategy=ddp"
            )
        self._push.put(name, gradient)
        self._missing.discard(name)
        if not self._missing:
            self.push()

    def push(self) -> None:
        """Send the push, even if gradients are missing, unless it has been sent."""
        if not self._pushed:
            self._pushed = True
            self._push.send(self.rank, self.sends, self._pushes)

    @property
    def missing(self) -> list[str]:
        """The parameters whose gradients can still be added to this step's push."""
        return [] if self._pushed else [name for name in self._names if name in self._missing]

    @property
    def is_expecting(self) -> bool:
        """Whether an answer is being received."""
        return bool(self._receiving)

    def expect(self, group: dist.ProcessGroup | None = None) -> None:
        """Start to receive an answer. It overwrites the parameters, which must not be in use."""
        self._answer_group = group
        for memory, tag in ((self._landing, wire.ANSWER), (self._counts, wire.ANSWERED_COUNTS)):
            if memory.numel():
                work = dist.irecv(memory, self.rank, group=group, tag=tag)
                assert work is not None
                self._receiving.append(work)

    @torch.no_grad()
    def complete(self, *, count_bytes: bool = True) -> int:
        """Wait for the answer, if one is expected.

        Args:
            count_bytes: whether to add its size to :attr:`received_bytes`.

        Returns:
            The number of elements received.
        """
        if not self._receiving:
            return 0
        for work in self._receiving:
            work.wait()
        self._receiving = []
        size_bytes = self._landing.nbytes + self._counts.nbytes
        self.sends.wait()
        if self._landing is not self._dense:
            self._dense.copy_(self._landing)
        elements = self._dense_elements
        specs = [
            wire.RowsSpec(count, len(table), shard.dtype, table.shape[1:])
            for count, (shard, table) in zip(self._counts.tolist(), self._tables.values(), strict=True)
        ]
        rows = wire.receive_rows(specs, self.rank, wire.ANSWERED_ROWS, self._answer_group)
        for (numbers, values), (_, table) in zip(rows, self._tables.values(), strict=True):
            table.index_copy_(0, numbers.long().to(table.device), values.to(table.device))
            elements += values.numel()
            size_bytes += numbers.nbytes + values.nbytes
        if count_bytes:
            self.received_bytes += size_bytes
        return elements

    def reset_counters(self) -> None:
        """Set the numbers of sent and received bytes to 0."""
        self.sends.size_bytes = self.received_bytes = 0
