"""What a strategy decides on the driver: the layout of a run, whether a job can be trained so, and what trains it."""

from __future__ import annotations

import abc
from typing import Any

from torch import nn

from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.planning.layout import Keys, LayoutRules
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.rank_context import Context


class Rules(LayoutRules[Keys], abc.ABC):
    """A strategy by its name: its keys ``Keys``, its layout, and its checks. All methods are class methods."""

    @classmethod
    @abc.abstractmethod
    def trainer(cls, options: Keys, mesh: Mesh, job: Job) -> type[Strategy]:
        """Return the class that trains ``job`` on the ranks of ``mesh``."""

    @classmethod
    def worker(cls, *, debug: bool) -> type[Any] | None:
        """Return the class of its workers, in ``debug`` of the one in this process; None for the training loop."""
        return None

    @classmethod
    def create(cls, context: Context, job: Job) -> Strategy:
        """Return what trains on this rank."""
        return cls.trainer(cls.keys(context.options), context.mesh, job)(context, job)

    @classmethod
    def check(cls, config: Config, job: Job, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        """Check whether the job can be trained by ``plan``, without allocating memory for its tensors.

        Args:
            errors: receives a line for each reason why the job cannot be trained.

        Returns:
            Notes for the user, printed with the plan.
        """
        from orchestrator.strategies.checks.job_checks import check_job  # which no rank needs

        return check_job(cls, config, job, plan, errors)

    @classmethod
    def moves_parameters(cls, options: Keys, mesh: Mesh, job: Job) -> bool:
        """Return whether ranks hold parameters, or parts of them, in other memory than ``job.model()`` gives them."""
        return cls.trainer(options, mesh, job).traits.moves_parameters

    @classmethod
    def why_not_compiled(cls, plan: Plan) -> str | None:
        """Return why this strategy cannot train a compiled model and what to set instead; None if it can."""
        return None

    @classmethod
    def gathered_bytes(cls, config: Config, mesh: Mesh, model: nn.Module) -> float:
        """Return the bytes that a worker gathers from others at the same time, for a model without memory."""
        return 0.0

    @classmethod
    def check_job(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        """Check what this strategy alone demands of a job and its model, the ``outline``; see :meth:`check`."""
        return ()
