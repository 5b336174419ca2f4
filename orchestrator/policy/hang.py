"""Whether a rank still gets on, by the time that a batch usually takes it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.config.schema import RecoveryConfig
from orchestrator.protocol.messages import Heartbeat, Phase

STEADY = ("train", "eval")
"""The phases with steady progress. In the others a rank may take its time, and the others may wait for it."""
BOUNDED = (*STEADY, "checkpoint")
"""Those that do not go on for ever: what a start may take, with downloads and all, nobody knows."""


@dataclass
class _Rank:
    ticks: int
    moved_at: float
    phase: Phase
    usual_tick_s: float | None


class HangDetector:
    """The ranks of one generation. Times are seconds of one monotonic clock."""

    def __init__(self, config: RecoveryConfig):
        self._config = config
        self._ranks: dict[int, _Rank] = {}

    def observe(self, rank: int, beat: Heartbeat, now: float) -> None:
        """A rank has answered."""
        known = self._ranks.get(rank)
        moved = known is None or (beat.phase, beat.ticks) != (known.phase, known.ticks)
        moved_at = now if known is None or moved else known.moved_at
        self._ranks[rank] = _Rank(beat.ticks, moved_at, beat.phase, beat.usual_tick_s)

    def hanging(self, now: float) -> list[int]:
        """The ranks that have not got on for too long."""
        all_steady = all(state.phase in STEADY for state in self._ranks.values())
        return [
            rank
            for rank, state in self._ranks.items()
            if state.phase in BOUNDED and now - state.moved_at > self._patience_s(state, all_steady)
        ]

    @property
    def usual_s(self) -> float:
        """What a batch takes the slowest rank."""
        return max((state.usual_tick_s or 0.0 for state in self._ranks.values()), default=0.0)

    def standing_s(self, now: float) -> float:
        """For how long some rank has not got on."""
        return now - min(state.moved_at for state in self._ranks.values())

    def _patience_s(self, state: _Rank, all_steady: bool) -> float:
        config = self._config
        if state.usual_tick_s is None or not all_steady:
            return config.hang_max_s
        return min(max(config.hang_factor * state.usual_tick_s, config.hang_min_s), config.hang_max_s)


def culprit(ranks: list[int], *, waiting: Mapping[int, bool], steps: Mapping[int, int]) -> tuple[int, str]:
    """Which of ``ranks`` a standstill is most likely the fault of, and why.

    ``waiting``: of those that answer, whether they wait in a collective operation.
    """
    silent = [rank for rank in ranks if rank not in waiting]
    if silent:
        return min(silent), "its process does not answer: it was stopped, or holds the interpreter"

    def advance(rank: int) -> tuple[int, int]:
        return steps.get(rank, 0), rank

    busy = [rank for rank in ranks if not waiting[rank]]
    if busy:
        return min(busy, key=advance), "it is elsewhere while the others wait for it"
    return min(ranks, key=advance), "every rank waits for another; this one is the least advanced"
