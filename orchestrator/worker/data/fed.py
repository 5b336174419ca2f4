"""Data that another process reads for this rank. What does so is no part of the core: it is imported when needed."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from orchestrator.job import Job, Split
from orchestrator.protocol.messages import Assignment
from orchestrator.protocol.metrics import Metric
from orchestrator.strategies.data.datasets import FEEDING
from orchestrator.worker.data.stream import Mark


@runtime_checkable
class Reader(Protocol):
    """What gives the samples of a run from a position on, as :class:`StreamReader` does."""

    position: int

    def read(self, count: int, *, first: int, end: int) -> Sequence[Any]: ...
    def reaches(self, position: int) -> bool: ...
    def add_bookmark(self, mark: Mark) -> None: ...
    def go_to_mark(self, position: int) -> int: ...
    def bookmark(self, position: int) -> Mark | None: ...
    def first_read(self) -> tuple[int, str] | None: ...
    def metrics(self) -> Mapping[str, Metric]: ...


class Fed(abc.ABC):
    """A split of the data that is read elsewhere. It looks like a stream, which gives the first samples."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    @abc.abstractmethod
    def reader(self) -> Reader:
        """Return a reader of the share of this rank."""

    @abc.abstractmethod
    def part(self, position: int, count: int, *, first: int, end: int) -> tuple[int, Sequence[Any]]:
        """Return a share of the next ``count`` samples of a split that is read once, and how many of these there are.

        The share has the last of them if it would have none.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End what reads the split; it can be read again."""


class Feeding(Protocol):
    """What opens the data of a run that is read elsewhere."""

    def reassign(self, assignment: Assignment) -> None:
        """Ask from now on in the generation of ``assignment``."""

    def open(self, split: Split) -> Fed | None:
        """Return the data of a split; None if the rank has to read it by itself, or if there is none."""


def feeding(assignment: Assignment, job: Job, warn: Callable[[str], None]) -> Feeding:
    """Return what reads for the ranks of a run. ``warn``: tells the user something."""
    return cast(Feeding, importlib.import_module(f"{FEEDING}.client").Feeding(assignment, job, warn))
