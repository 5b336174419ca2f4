"""Which rank the others wait for on their devices, from what each has enqueued. Pure.

A rank with a GPU that waits for another stands where it reads a number from the device, which may be in any code. So
its Python stack does not tell whether it waits. What it has enqueued does: it waits if one of its operations needs an
operation of another rank that this one has not enqueued.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from orchestrator.protocol.flight import Enqueued, Message


def awaited(ranks: Mapping[int, Enqueued]) -> tuple[int, str] | None:
    """Return the rank that others wait for and that waits for none, and why; None if there is no such rank.

    Args:
        ranks: what each rank has enqueued.
    """
    waits = list(_waits(ranks))
    waiting = {rank for rank, _, _ in waits}
    found = {rank: why for _, rank, why in reversed(waits) if rank not in waiting}
    return min(found.items(), default=None)


def _waits(ranks: Mapping[int, Enqueued]) -> Iterator[tuple[int, int, str]]:
    """Yield each rank that waits, the one that it waits for, and what that one has not enqueued."""
    members = {name: group for enqueued in ranks.values() for name, group in enqueued.members.items()}
    for rank, enqueued in ranks.items():
        for name, number in enqueued.last.items():
            # If the members are unknown, a rank that has enqueued nothing in the group may not belong to it.
            users = {other for other in ranks if name in ranks[other].last}
            for other in users.union(members.get(name, ())).intersection(ranks):
                if ranks[other].last.get(name, 0) < number:
                    yield rank, other, f"operation {number} of group {name} ({enqueued.operation[name]})"
        for message, count in enqueued.sends.items():
            yield from _unmatched(rank, message, count, ranks, members, of_receiver=True)
        for message, count in enqueued.receives.items():
            yield from _unmatched(rank, message, count, ranks, members, of_receiver=False)


def _unmatched(
    rank: int,
    message: Message,
    count: int,
    ranks: Mapping[int, Enqueued],
    members: Mapping[str, tuple[int, ...]],
    *,
    of_receiver: bool,
) -> Iterator[tuple[int, int, str]]:
    """Yield the wait of ``rank`` if the other end of the message has enqueued it less than ``count`` times."""
    name, sender, receiver = message
    if name not in members:
        return
    other = members[name][receiver if of_receiver else sender]
    if other not in ranks:
        return
    matching = ranks[other].receives if of_receiver else ranks[other].sends
    if matching.get(message, 0) < count:
        yield rank, other, f"a {'receive' if of_receiver else 'send'} of group {name} ({sender}->{receiver})"
