"""Deadlocks in the order in which the ranks of a job communicate, found by replaying it without buffers."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A collective operation, or a transfer from one rank to another.

    Attributes:
        name: The name of the operation; ``transfer`` for a send and for the receive that belongs to it.
        group: The name of the process group.
        ranks: The global ranks that take part; of a transfer, the sender and the receiver.
        nbytes: The bytes of its largest argument, which may differ between the ranks.
    """

    name: str
    group: str
    ranks: tuple[int, ...]
    nbytes: int = field(default=0, compare=False)

    def seen_by(self, rank: int) -> str:
        """Return what the operation is for ``rank``, which takes part in it."""
        if self.name != "transfer":
            return f"{self.name} of the ranks {', '.join(map(str, self.ranks))} in group {self.group}"
        sender, receiver = self.ranks
        part = f"send to rank {receiver}" if rank == sender else f"receive from rank {sender}"
        return f"{part} in group {self.group}"


Launch = tuple[Operation, ...]
"""What a rank starts at once: one operation, or the transfers of a batch."""


def find_deadlock(launches: Sequence[Sequence[Launch]]) -> str | None:
    """Replay the launches of every rank and describe a deadlock; None if all operations end.

    The rules are stricter than those of NCCL:

    - An operation ends only when all its ranks have launched it. Sends are not buffered. The transfers of one launch
      progress independently of each other.
    - A rank launches nothing before its previous launch has ended.

    With NCCL, an operation waits only for some of the earlier launches of its rank: those of the same communicator, and
    those that the host or the GPU has waited for. A process group with ``device_id`` has one communicator and one
    stream for everything, single sends and receives included; otherwise each pair of ranks has its own for these. The
    first transfer between two ranks also blocks the host, and all ranks have to use their communicators in the same
    order. To wait for all earlier launches covers each of these cases, so what ends here ends with NCCL too.

    Sources: NCCL user guide, "Point-to-point communication" and "Using multiple NCCL communicators concurrently";
    torch, ``ProcessGroupNCCL::pointToPoint``.

    Args:
        launches: For each rank, its launches in order.
    """
    remaining = [deque(own) for own in launches]
    current: list[list[Operation]] = [[] for _ in launches]
    while True:
        for own, following in zip(current, remaining, strict=True):
            if not own and following:
                own += following.popleft()
        ready = next((op for own in current for op in own if all(op in current[rank] for rank in op.ranks)), None)
        if ready is None:
            break
        for rank in ready.ranks:
            current[rank].remove(ready)
    if not any(current):
        return None
    return _describe(current, [len(own) - len(rest) for own, rest in zip(launches, remaining, strict=True)])


def _describe(current: Sequence[Sequence[Operation]], numbers: Sequence[int]) -> str:
    """Return which ranks wait for each other in their current operations, or for a rank that has none left.

    Args:
        current: For each rank, the operations of its current launch that have not ended; none of them can.
        numbers: For each rank, the number of its current launch, from 1.
    """
    rank = next(r for r, operations in enumerate(current) if operations)
    waits: dict[int, str] = {}
    while current[rank] and rank not in waits:
        operation = current[rank][0]
        absent = next(r for r in operation.ranks if operation not in current[r])
        waits[rank] = f"rank {rank} waits for rank {absent}: {operation.seen_by(rank)}, its launch {numbers[rank]}"
        rank = absent
    if rank in waits:
        cycle = list(waits)
        return "\n".join(waits[r] for r in cycle[cycle.index(rank) :])
    return "\n".join([*waits.values(), f"rank {rank} has ended"])
