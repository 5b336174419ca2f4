"""The workers of a run that have a rank, and what the driver asks them: heartbeats, and calls of their methods."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import ray.exceptions

from orchestrator.driver.process import calls
from orchestrator.protocol.messages import Heartbeat, WorkerInfo, merged

HEARTBEATS_PER_ROUND, MOST_ROUNDS = 64, 64
"""Members asked in one round. Larger gangs need several rounds until each rank has been heard, but not more than the
second: a rank that has to leave says so in time, and one that progresses is not taken for one that hangs."""
HEARTBEAT_ATTEMPTS = 3
"""A worker that lives may fail to answer now and then: without memory, it says itself what took it a moment later."""

WorkerMethod = Any
"""A method of :class:`~orchestrator.worker.actor.Worker`, such as ``Worker.hold``, as Ray's decorator returns it."""


@dataclass(frozen=True)
class Member:
    """A worker with a rank: its actor, where that runs, and in which slot."""

    global_rank: int
    actor: Any
    info: WorkerInfo
    slot: int


class Members:
    """The workers with a rank.

    Attributes:
        members: the workers, by rank.
        failed_heartbeats: by rank, the last errors of the workers that live and have failed to answer
            :data:`HEARTBEAT_ATTEMPTS` times in a row.
    """

    def __init__(self) -> None:
        self.members: tuple[Member, ...] = ()
        self.failed_heartbeats: dict[int, ray.exceptions.RayError] = {}
        self._pending_heartbeats: dict[Any, int] = {}  # by reference: the rank
        self._last_heartbeats: dict[int, Heartbeat] = {}  # by rank: those that came with outcomes, to be returned
        self._num_failed: Counter[int] = Counter()  # by rank: the heartbeats that have failed in a row
        self._next_asked = 0  # the rank with which the next round of heartbeats begins

    def heartbeats(
        self, *, with_system_metrics: bool, wait_s: float, ranks: Collection[int] | None = None
    ) -> dict[int, Heartbeat]:
        """Ask members for a heartbeat and return those that come within ``wait_s`` seconds, by rank.

        A later answer is merged into the rank's next one. The heartbeat of an outcome is returned as well, but not
        before the rank's pending one, so that reports stay in order.

        Args:
            with_system_metrics: whether the first member of each node adds the system metrics of its node.
            wait_s: how long to wait for answers.
            ranks: the ranks to ask. None for those in turn, see :data:`HEARTBEATS_PER_ROUND`.
        """
        errors: dict[int, ray.exceptions.RayError] = {}
        answers: list[tuple[int, Heartbeat]] = list(
            calls.answers_in_time(self._pending_heartbeats, 0.0, errors=errors).items()
        )
        reporting: set[int] = set()
        if with_system_metrics:
            reporting = set({m.info.node_id: m.global_rank for m in reversed(self.members)}.values())
        asked = self._next_in_turn() | reporting if ranks is None else set(ranks)
        for rank in sorted(asked - self.unanswered()):
            answer = self.members[rank].actor.heartbeat.remote(rank in reporting)
            self._pending_heartbeats[answer] = rank
        awaited = {r: rank for r, rank in self._pending_heartbeats.items() if ranks is None or rank in ranks}
        others = {r: rank for r, rank in self._pending_heartbeats.items() if r not in awaited}
        answers += calls.answers_in_time(awaited, wait_s, errors=errors).items()
        self._pending_heartbeats = others | awaited
        alive = {rank: e for rank, e in errors.items() if calls.cause_of_death(e) is None}
        self._num_failed.update(alive.keys())
        for rank, _ in answers:
            self._num_failed.pop(rank, None)
        self.failed_heartbeats = {r: e for r, e in alive.items() if self._num_failed[r] >= HEARTBEAT_ATTEMPTS}
        complete = self._last_heartbeats.keys() - self.unanswered()
        answers += [(rank, self._last_heartbeats.pop(rank)) for rank in complete]
        return merged(answers)

    def add_last_heartbeat(self, rank: int, heartbeat: Heartbeat) -> None:
        """Add the heartbeat of an outcome to the results of :meth:`heartbeats`."""
        self._last_heartbeats[rank] = heartbeat

    def unanswered(self) -> set[int]:
        """Return the ranks that have been asked for a heartbeat and have not answered yet."""
        return set(self._pending_heartbeats.values())

    def ask_one(
        self, rank: int, method: WorkerMethod, *args: Any, timeout_s: float, check: Callable[[], None] | None = None
    ) -> Any:
        """Call ``method`` of one member and return its answer; ``check()`` runs meanwhile.

        Raises:
            NoAnswerError: not in time.
            GangError: Ray is dead.
            RayError: the worker is dead, or could not carry out the call.
        """
        return calls.all_answers([_call(self.members[rank], method, *args)], timeout_s, check=check)[0]

    def poll(
        self,
        method: WorkerMethod,
        *args: Any,
        ranks: Collection[int],
        timeout_s: float,
        check: Callable[[], None] | None = None,
    ) -> dict[int, Any]:
        """Call ``method`` of some members and return the answers that come in time, by rank.

        ``check()`` runs meanwhile, and may raise to stop waiting.
        """
        pending = {_call(m, method, *args): m.global_rank for m in self.members if m.global_rank in ranks}
        return calls.answers_in_time(pending, timeout_s, check=check)

    def tell(self, method: WorkerMethod, *args: Any, ranks: Collection[int]) -> None:
        """Call ``method`` of some members without waiting for an answer."""
        for member in self.members:
            if member.global_rank in ranks:
                _call(member, method, *args)

    def _assign(self, members: tuple[Member, ...]) -> None:
        """Let these be the members. Members that stay keep their pending calls."""
        unchanged = {m.global_rank for m, before in zip(members, self.members, strict=False) if m.info == before.info}
        self.members = members
        self._pending_heartbeats = {r: rank for r, rank in self._pending_heartbeats.items() if rank in unchanged}
        self._last_heartbeats = {rank: h for rank, h in self._last_heartbeats.items() if rank in unchanged}
        self._num_failed.clear()
        self._next_asked = 0

    def _infos(self) -> list[WorkerInfo]:
        return [member.info for member in self.members]

    def _next_in_turn(self) -> set[int]:
        """Return the ranks to ask in the next round."""
        asked = in_turn(self._next_asked, len(self.members))
        self._next_asked = (asked[-1] + 1) % len(self.members)
        return set(asked)


def in_turn(first: int, world_size: int) -> list[int]:
    """Return the ranks of a round that begins with ``first``."""
    count = min(world_size, max(HEARTBEATS_PER_ROUND, math.ceil(world_size / MOST_ROUNDS)))
    return [(first + i) % world_size for i in range(count)]


def _call(member: Member, method: WorkerMethod, *args: Any) -> Any:
    return getattr(member.actor, method.__name__).remote(*args)
