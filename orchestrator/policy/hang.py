"""Whether a rank still makes progress, judged by the usual time of a batch. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.config.schema import RecoveryConfig
from orchestrator.protocol.messages import Heartbeat, Phase

STEADY = ("train", "eval")
"""The phases with steady progress. In the other phases a rank may take longer, and the others may wait for it."""
BOUNDED = (*STEADY, "checkpoint", "sample", "callback")
"""The phases with a time limit. The others have none: a start may include downloads of any size."""


@dataclass
class _Rank:
    ticks: int
    progressed_at: float
    phase: Phase
    usual_tick_s: float | None


class HangDetector:
    """Follows the ranks of one generation. All times are seconds of one monotonic clock."""

    def __init__(self, config: RecoveryConfig):
        self._config = config
        self._ranks: dict[int, _Rank] = {}

    def observe(self, rank: int, heartbeat: Heartbeat, now: float) -> None:
        """Record a heartbeat."""
        known = self._ranks.get(rank)
        progressed = known is None or (heartbeat.phase, heartbeat.ticks) != (known.phase, known.ticks)
        progressed_at = now if known is None or progressed else known.progressed_at
        self._ranks[rank] = _Rank(heartbeat.ticks, progressed_at, heartbeat.phase, heartbeat.usual_tick_s)

    def hanging(self, now: float) -> list[int]:
        """Return the ranks that have made no progress for longer than allowed."""
        all_steady = all(state.phase in STEADY for state in self._ranks.values())
        return [
            rank
            for rank, state in self._ranks.items()
            if state.phase in BOUNDED and now - state.progressed_at > self._limit_s(state, all_steady)
        ]

    @property
    def usual_s(self) -> float:
        """The usual time of a batch on the slowest rank, in seconds; 0 if unknown."""
        return max((state.usual_tick_s or 0.0 for state in self._ranks.values()), default=0.0)

    def stalled_s(self, now: float) -> float:
        """Return the seconds since the last progress of the rank that has been without it for longest."""
        return now - min(state.progressed_at for state in self._ranks.values())

    def _limit_s(self, state: _Rank, all_steady: bool) -> float:
        config = self._config
        if state.usual_tick_s is None or not all_steady:
            return config.hang_max_s
        return min(max(config.hang_factor * state.usual_tick_s, config.hang_min_s), config.hang_max_s)


def culprit(ranks: list[int], *, waiting: Mapping[int, bool], steps: Mapping[int, int]) -> tuple[int, str]:
    """Return which of ``ranks`` most likely causes a hang, and why.

    Args:
        ranks: the ranks that have not ended.
        waiting: for each rank that answers, whether it waits in a collective operation.
        steps: the last completed step of each rank.
    """
    silent = [rank for rank in ranks if rank not in waiting]
    if silent:
        return min(silent), "its process does not answer: it was stopped, or holds the interpreter lock"

    def progress(rank: int) -> tuple[int, int]:
        return steps.get(rank, 0), rank

    busy = [rank for rank in ranks if not waiting[rank]]
    if busy:
        return min(busy, key=progress), "it has not joined the collective operation that the others wait in"
    return min(ranks, key=progress), "all ranks wait for each other, and this one has completed the fewest steps"
