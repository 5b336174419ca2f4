"""How the writes of checkpoints end, and how far they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.state.best import BestSoFar
from orchestrator.state.part_writers import StagedPart


@dataclass(frozen=True, kw_only=True)
class Written:
    """A checkpoint that is complete on disk at ``path``, or a ``part`` of it.

    Attributes:
        seconds: the duration of the write, with its upload.
        stall_ms: how long training stood still for the snapshot.
        best: the best evaluation so far, whose checkpoint is kept beside the newest ones; None if none is followed.
        part: what this rank has staged of a checkpoint for a store that several ranks write; None of a whole one.
    """

    step: int
    path: Path
    seconds: float
    stall_ms: float
    size_bytes: int
    best: BestSoFar | None = None
    part: StagedPart | None = None


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A checkpoint that is being written. ``progress`` counts the parts that have been written."""

    step: int
    progress: int


@dataclass(frozen=True, kw_only=True)
class WriteFailed:
    """A checkpoint that could not be written, and why."""

    step: int
    reason: str
