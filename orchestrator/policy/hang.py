"""Whether a rank still makes progress, judged by what is usual in its phase. Pure.

A rank may be slow for a good reason, so it has a long time. A process that a signal has stopped is found within seconds
by other means: see ``driver/nodes/node_watch.py``.

A rank with a GPU that waits for another stands where it reads a number from the device, which may be in any code. So
its Python stack does not tell whether it waits. What it has enqueued does: it waits if one of its operations needs an
operation of another rank that this one has not enqueued.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.config.operation import RecoveryConfig
from orchestrator.protocol.flight import Enqueued, Message
from orchestrator.protocol.messages import Heartbeat, Phase


def limit_of(config: RecoveryConfig, heartbeat: Heartbeat, *, earlier_hangs: Sequence[int] = ()) -> tuple[float, str]:
    """Return the seconds without progress after which a rank counts as hanging, and the key that allows it more.

    Args:
        heartbeat: the state of the rank.
        earlier_hangs: the steps at which ranks were killed before because they hung. Each of them at the step of
            ``heartbeat`` doubles the time, because a slow rank would otherwise be killed again at the same place.
    """
    usual_s = heartbeat.usual_tick_s
    match heartbeat.phase:
        case "join":
            limit_s, key = math.inf, "cluster.rendezvous_timeout_s"  # which the rank itself obeys
        case "start" | "build" | "compile" | "end":
            limit_s, key = config.build_max_s, "recovery.build_max_s"
        case "train" | "eval" if usual_s is not None:
            least = max(
                (config.hang_factor * usual_s, "recovery.hang_factor"), (config.hang_min_s, "recovery.hang_min_s")
            )
            limit_s, key = min(least, (config.hang_max_s, "recovery.hang_max_s"))
        case _:
            limit_s, key = config.hang_max_s, "recovery.hang_max_s"
    return limit_s * (1 << earlier_hangs.count(heartbeat.step)), key


@dataclass
class _Rank:
    """What is known of a rank.

    Attributes:
        progressed_at: its last progress.
        busy_since: the last time that it progressed or waited for other ranks.
    """

    heartbeat: Heartbeat
    progressed_at: float
    busy_since: float

    @property
    def since(self) -> float:
        """When it began what it does now."""
        return self.progressed_at if self.heartbeat.waiting else self.busy_since


class HangDetector:
    """Follows the ranks of one generation. All times are seconds of one monotonic clock.

    Args:
        synchronous: whether a rank that hangs stops all others within a step.
        earlier_hangs: see :func:`limit_of`.
    """

    def __init__(self, config: RecoveryConfig, *, synchronous: bool, earlier_hangs: Sequence[int] = ()):
        self._config = config
        self._synchronous = synchronous
        self._earlier_hangs = earlier_hangs
        self._ranks: dict[int, _Rank] = {}
        self._usual_s: dict[int, float] = {}

    def observe(self, rank: int, heartbeat: Heartbeat, now: float) -> None:
        """Record a heartbeat."""
        if heartbeat.usual_tick_s is not None:
            self._usual_s[rank] = heartbeat.usual_tick_s
        known = self._ranks.get(rank)
        if known is None or _place(heartbeat) != _place(known.heartbeat):
            self._ranks[rank] = _Rank(heartbeat, progressed_at=now, busy_since=now)
            return
        known.heartbeat = heartbeat
        if heartbeat.waiting:
            known.busy_since = now

    def hanging(self, unfinished: Collection[int], now: float) -> list[int]:
        """Return the ranks that hang, or wait for one that hangs.

        A rank without progress may wait for a slow one, so a hang is only certain if no rank has made progress for
        longer than it is allowed. An asynchronous rank also hangs alone, if it is busy for that long. The time that a
        rank has waited for others does not count against what it does next.

        Args:
            unfinished: the ranks that have not ended.
            now: the time of the last :meth:`observe`.
        """

        def is_stuck(rank: int) -> bool:
            state = self._ranks.get(rank)
            return state is not None and now - state.since > self._limit_of(state)[0]

        if all(map(is_stuck, unfinished)):  # the first one that is not settles it, whatever the size of the gang
            return list(unfinished)
        return [r for r in unfinished if not self._synchronous and is_stuck(r) and not self._ranks[r].heartbeat.waiting]

    @property
    def usual_s(self) -> float:
        """The usual time of a batch on the slowest rank, in seconds; 0 if unknown."""
        return max(self._usual_s.values(), default=0.0)

    def describe(self, rank: int, now: float) -> str:
        """Say for how long ``rank`` has made no progress, and which key allows it more."""
        state = self._ranks[rank]
        _, key = self._limit_of(state)
        return f"no progress for {now - state.since:.0f} s in phase {state.heartbeat.phase} ({key})"

    def phase(self, rank: int) -> Phase | None:
        """Return the phase of ``rank`` at its last heartbeat; None if it has sent none."""
        return self._ranks[rank].heartbeat.phase if rank in self._ranks else None

    def _limit_of(self, state: _Rank) -> tuple[float, str]:
        return limit_of(self._config, state.heartbeat, earlier_hangs=self._earlier_hangs)


def _place(heartbeat: Heartbeat) -> tuple[str, int]:
    return heartbeat.phase, heartbeat.ticks


class WatchedTime:
    """A clock that runs while the driver watches: a driver that was stopped, or was slow, has seen no silence.

    It stands still while a debugger holds a rank, for which all others wait.

    Args:
        now: the present time of a monotonic clock, in seconds, with which this one begins.
        longest_round_s: the most that it advances between two rounds.
    """

    def __init__(self, now: float, *, longest_round_s: float):
        self._seconds = self._last = now
        self._longest_round_s = longest_round_s

    def advance(self, now: float, *, held: bool = False) -> float:
        """Begin a round at ``now``, and return the time of this clock; ``held``: whether a debugger holds a rank."""
        self._seconds += 0.0 if held else min(now - self._last, self._longest_round_s)
        self._last = now
        return self._seconds


def culprit(
    ranks: Collection[int],
    *,
    waiting: Mapping[int, bool],
    steps: Mapping[int, int],
    enqueued: Mapping[int, Enqueued],
) -> tuple[int, str]:
    """Return the rank in ``ranks`` that most likely causes the hang, and why.

    Args:
        ranks: the ranks that hang, or wait for one that hangs.
        waiting: for each rank that answers, whether it waits in a collective operation.
        steps: the last completed step of each rank.
        enqueued: what each rank has enqueued, as far as it is known, which tells more than ``waiting``.
    """
    silent = [rank for rank in ranks if rank not in waiting]
    if silent:
        return min(silent), "its process does not answer: it was stopped, or holds the interpreter lock"

    found = awaited({rank: enqueued[rank] for rank in ranks if rank in enqueued})
    if found is not None:
        return found[0], f"it has not enqueued {found[1]}, in which the others wait"

    def progress(rank: int) -> tuple[int, int]:
        return steps.get(rank, 0), rank

    busy = [rank for rank in ranks if not waiting[rank]]
    if busy:
        return min(busy, key=progress), "it has not joined the collective operation that the others wait in"
    return min(ranks, key=progress), "all ranks wait for each other, and this one has completed the fewest steps"


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
    """Yield each waiting rank, the awaited one, and the operation that the awaited one has not enqueued."""
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
