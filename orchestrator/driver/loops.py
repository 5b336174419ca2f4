"""The door of loops around runs: what executes the runs of a command that has several, as a sweep does.

The feature that has one answers with a module ``several_runs``, which begins the :class:`Loop` of a launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from orchestrator.driver.process.run_context import RunResult
from orchestrator.driver.process.signals import StopSignals
from orchestrator.planning.plan import Node
from orchestrator.policy.elastic import Sizes

if TYPE_CHECKING:
    from orchestrator.driver.checked_runs import CheckedRun


class Execute(Protocol):
    """Executes one run, which is recorded as a part of ``sweep``."""

    def __call__(self, *, sweep: Mapping[str, str] | None) -> RunResult: ...


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run that a loop may execute."""

    checked: CheckedRun
    sizes: Sizes
    execute: Execute


class Loop(Protocol):
    """The runs of one command.

    Attributes:
        errors: the errors of the runs that are left out.
    """

    errors: list[str]

    def leaves_out(self, overrides: Sequence[str], errors: Sequence[str]) -> bool:
        """Leave out a run with errors, if that is asked for; returns whether it is left out."""

    def title_of(self, overrides: Sequence[str]) -> str:
        """Return what distinguishes a run from the others."""

    def say(self, text: str) -> None:
        """Print ``text``, with secrets masked."""

    def execute(self, runs: Sequence[PlannedRun], nodes: Sequence[Node], stop: StopSignals) -> list[RunResult]:
        """Execute the runs; returns the results of those that have one. After a signal no other starts."""
