"""The door of strategies that choose another one for a run: ``auto``.

The feature that has such a strategy answers with a module ``choosing``, which is a :class:`Choosing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from orchestrator import features
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.driver.process.run_context import RunResult
from orchestrator.job import Job
from orchestrator.planning.plan import Node, Plan
from orchestrator.policy.elastic import Sizes
from orchestrator.records.run_dir import RunDir

QuietRun = Callable[[Config, Plan, Job], RunResult]
"""Executes a run without a console."""


class NotMeasuredError(Exception):
    """A signal has stopped a run that measures.

    Attributes:
        result: how it ended.
    """

    def __init__(self, result: RunResult):
        super().__init__(result.reason)
        self.result = result


class Choice(Protocol):
    """The chosen strategy."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides of the strategy."""

    @property
    def config(self) -> Config:
        """The configuration of the run that trains with it."""

    @property
    def sizes(self) -> Sizes:
        """The sizes that this run may have."""

    @property
    def text(self) -> str:
        """Why it was chosen, for the terminal."""

    def write_to(self, run_dir: RunDir) -> None:
        """Record the choice in the directory of the run."""


class Choosing(Protocol):
    """What chooses."""

    def choose(
        self,
        config: Config,
        job: Job,
        plan: Plan,
        nodes: tuple[Node, ...],
        run: QuietRun,
        *,
        redactor: Redactor,
        oversubscribe_cpus: bool,
        measure: bool,
    ) -> Choice:
        """Choose a strategy for the run of ``config``.

        Args:
            plan: on as many workers as the strategy may use.
            nodes: the nodes of the cluster.
            run: executes the runs that measure.
            redactor: masks secrets in the reasons of refusals.
            oversubscribe_cpus: see :func:`make_plan`.
            measure: whether runs may be executed.

        Raises:
            NotMeasuredError: a signal came.
            ConfigError: no strategy can train the job here; nothing else was started.
        """

    def chosen_before(self, run_dir: RunDir) -> Sequence[str] | None:
        """Return the overrides of the strategy that was chosen for a run; None if none was."""


def chooser() -> Choosing:
    """Return what chooses, for a configuration whose strategy is :attr:`StrategyConfig.is_choice`."""
    (found,) = features.modules("choosing")
    return cast(Choosing, found)
