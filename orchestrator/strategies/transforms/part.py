"""What the workers of a group along one dimension of the mesh divide of a model whose samples they compute together.

A dimension is a class: as such, it says on the driver whether a job can be divided so, and each worker has an object of
it for its part. What has parts loops over them, and asks for none by name; :data:`~.every.TRANSFORMS` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from orchestrator.config.schema import Config, StrategyConfig, TrainConfig
from orchestrator.job import Job
from orchestrator.planning.mesh import Dimension, Mesh
from orchestrator.planning.placement import Placement, Shape
from orchestrator.planning.plan import Plan
from orchestrator.protocol.metrics import MetricSpec, wait_metric
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.rank_context import Context


class Part:
    """The part of one worker. By itself, it divides nothing: every worker of the group computes everything.

    Attributes:
        waits: what a step waits for the other workers of the group.
    """

    dimension: ClassVar[Dimension]
    """The dimension along which the workers of a group are."""

    divides_layers: ClassVar[bool] = False
    """Whether a worker has a part of some parameters, and of the gradients of others."""

    count = 1
    """The number of parts that parameters are divided into."""

    waits: WaitTimer

    # On the driver

    @classmethod
    def unused_keys(cls, mesh: Mesh) -> Mapping[str, Sequence[str]]:
        """Return the keys that have no effect in a mesh, by the reason."""
        return {}

    @classmethod
    def layout_errors(cls, options: StrategyConfig, mesh: Mesh) -> list[str]:
        """Return why keys do not go together in a mesh."""
        return []

    @classmethod
    def check(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        """Check that the job can be divided so, if there are several workers; return notes for the user."""
        return ()

    @classmethod
    def outline(cls, outline: Outline, count: int, found: Mapping[Hashable, Any]) -> Outline:
        """Return the outline of what one of ``count`` workers computes, given what :meth:`check` has found."""
        return outline

    @classmethod
    def called_with(cls, job: Job, inputs: Any) -> Any:
        """Return what a divided model is called with, given the inputs of a batch."""
        return inputs

    # On each worker

    @classmethod
    def find(cls, context: Context, job: Job, train_set: Any) -> Part:
        """Return the part of a rank that is one of several."""
        raise NotImplementedError

    def of(self, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """Return a constructor of this part of the model that ``build`` returns."""
        return build

    def placed(self, name: str, placement: Placement) -> Placement:
        """Return where a parameter of a model of :meth:`of` is, given its place among fewer dimensions."""
        return placement

    def job(self, job: Job, *, by_rows: bool = True) -> Job:
        """Return the job for passes through a model of :meth:`of`.

        ``by_rows``: whether a loss may be computed of this worker's share of the output.
        """
        return job

    def begin(self, inputs: Any) -> None:
        """Begin a pass of a model of :meth:`of` with the inputs of a batch, unless the job calls it."""

    def whole(self, output: Any) -> Any:
        """Return the whole output, given that of a model of :meth:`of`. Collective."""
        return output

    def connect(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Compute with the ranks of ``group``; None: with no others, until the next generation. Collective."""

    def flop_share(self) -> float:
        """Return how much the operations that run now count."""
        return 1

    def is_timed(self, train: TrainConfig) -> bool:
        """Return whether :attr:`waits` sees what a step waits for."""
        return True


@dataclass(frozen=True)
class Parts:
    """All parts of one worker, the innermost first; none if nothing is divided so."""

    each: Sequence[Part] = ()

    @property
    def count(self) -> int:
        """The number of parts that parameters are divided into."""
        return math.prod(part.count for part in self.each)

    def of(self, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """Return a constructor of what this worker has of the model that ``build`` returns."""
        for part in self.each:
            build = part.of(build)
        return build

    def placement(self, name: str, shape: Shape) -> Placement:
        """Return where a parameter of a model of :meth:`of` is that has this shape there."""
        placement = Placement(shape=shape)
        for part in self.each:
            placement = part.placed(name, placement)
        return placement

    def job(self, job: Job, *, by_rows: bool = True) -> Job:
        """Return the job for passes through a model of :meth:`of`; see :meth:`Part.job`."""
        for part in self.each:
            job = part.job(job, by_rows=by_rows)
        return job

    def begin(self, job: Job, inputs: Any) -> Any:
        """Begin a pass with the inputs of a batch. Return what a model of :meth:`of` is called with."""
        for part in self.each:
            part.begin(inputs)
        for part in self.each:
            inputs = part.called_with(job, inputs)
        return inputs

    def whole(self, output: Any) -> Any:
        """Return the whole output, given that of a model of :meth:`of`. Collective."""
        for part in self.each:
            output = part.whole(output)
        return output

    def connect(self, group_of: Callable[[Dimension], dist.ProcessGroup | None], device: torch.device) -> None:
        """Compute with the ranks that have the other parts. Collective."""
        for part in reversed(self.each):
            part.connect(group_of(part.dimension), device)

    def close(self, device: torch.device) -> None:
        """Release the process groups."""
        for part in self.each:
            part.connect(None, device)

    def flop_share(self) -> float:
        """Return how much the operations that run now count: what several workers compute alike counts once."""
        return math.prod(part.flop_share() for part in self.each)

    def timers(self, train: TrainConfig) -> Mapping[MetricSpec, WaitTimer]:
        """Return what a step waits for, by metric."""
        return {wait_metric(part.dimension): part.waits for part in self.each if part.is_timed(train)}
