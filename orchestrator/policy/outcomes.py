"""How the part of each rank in a generation ended, as far as it is known. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from orchestrator.config.text import first_few
from orchestrator.policy.failure import first_failure
from orchestrator.protocol.messages import Failure, Outcome, RecoverableSteps


class Outcomes:
    """The outcomes of the ranks of one generation.

    Attributes:
        by_rank: the outcomes that are known.
        returned: the ranks whose process lives.
    """

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.by_rank: dict[int, Outcome] = {}
        self.returned: set[int] = set()

    def __contains__(self, rank: int) -> bool:
        return rank in self.by_rank

    def add(self, rank: int, outcome: Outcome) -> None:
        """Add what a rank has returned. What was recorded before stays: the driver has killed the rank for it."""
        self.returned.add(rank)
        self.by_rank.setdefault(rank, outcome)

    def fail(self, rank: int, failure: Failure, *, step: int) -> None:
        """Record that a rank failed after ``step``, as the driver has found."""
        self.by_rank[rank] = Outcome(status="failed", step=step, failure=failure)

    @property
    def unfinished(self) -> list[int]:
        """The ranks whose outcome is not known."""
        return [rank for rank in range(self.world_size) if rank not in self.by_rank]

    @property
    def any_failed(self) -> bool:
        """Whether a rank has failed."""
        return any(outcome.status == "failed" for outcome in self.by_rank.values())

    @property
    def first_failed(self) -> int | None:
        """The rank whose failure caused the others; None if none has failed."""
        return first_failure(self.by_rank)

    def least_advanced(self, last_step: Mapping[int, int]) -> int | None:
        """Return the rank that the others no longer wait for, which has not ended; None unless that is the failure.

        It is so if all failures are broken connections. ``last_step``: the last completed step of each rank.
        """
        rank = self.first_failed
        if rank is None or not self.failure(rank).collateral or not self.unfinished:
            return None
        return min(self.unfinished, key=lambda r: (last_step.get(r, 0), r))

    @property
    def last_step(self) -> int:
        """The last step that an ended rank has completed; 0 if none has ended."""
        return max((outcome.step for outcome in self.by_rank.values()), default=0)

    def failure(self, rank: int) -> Failure:
        """Return the failure of a rank that has failed; of a broken connection, also who has ended it in order."""
        failure = self.by_rank[rank].failure
        assert failure is not None
        if failure.collateral and self.done:
            return replace(failure, message=f"{failure.message}; {self.left_by}")
        return failure

    @property
    def done(self) -> list[int]:
        """The ranks that have done all of their part."""
        return [rank for rank, outcome in self.by_rank.items() if outcome.status == "done"]

    @property
    def left_by(self) -> str:
        """Why the others may wait in vain for the ranks that are :attr:`done`, of which there are some."""
        ranks = first_few([f"rank {rank}" for rank in sorted(self.done)])
        return f"{ranks} ended without an error before, so the ranks disagree on when to end"

    def all_ended(self, status: Literal["done", "stopped"]) -> bool:
        """Return whether every rank has ended with ``status``."""
        return not self.unfinished and all(outcome.status == status for outcome in self.by_rank.values())

    def survivors(self) -> dict[int, RecoverableSteps]:
        """Return the state that each rank holds whose process can continue."""
        return {
            rank: outcome.recoverable_steps
            for rank, outcome in self.by_rank.items()
            if rank in self.returned and (outcome.failure is None or outcome.failure.collateral)
        }
