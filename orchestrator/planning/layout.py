"""How a strategy lays a run over ranks: the interface between planning and the strategies. No Ray, no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from orchestrator.config.schema import Config, StrategyConfig
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.schedules import PipelineLayout


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The ranks of a run and what each needs.

    ``devices_per_worker``: devices that one worker process drives. ``one_node``: all ranks must share a node.
    ``pipeline``: None if the model is not cut. ``split``: the layers at which stages begin; None to balance the stages
    by measured time. ``notes``: what the person should know, for the plan.
    """

    mesh: Mesh
    devices_per_worker: int = 1
    one_node: bool = False
    pipeline: PipelineLayout | None = None
    split: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()


class LayoutRules:
    """What a strategy decides before anything starts. Pure class methods: no process group, no device, no model."""

    config_class: ClassVar[type[StrategyConfig]]
    """The strategy's own keys."""

    cpu_only: ClassVar[str | None] = None
    """Why the strategy runs on CPUs only; None if it runs on GPUs too."""

    @classmethod
    def is_synchronous(cls, options: StrategyConfig) -> bool:
        """Whether every step has the loss of ``single`` for the same seed, data and global batch."""
        return True

    @classmethod
    def default_num_workers(cls, options: StrategyConfig, *, num_gpus: int) -> int:
        """The number of workers for ``strategy.num_workers=auto``; ``num_gpus`` is 0 for a run on CPUs."""
        return num_gpus or 2

    @classmethod
    def plan_layout(cls, config: Config, num_workers: int, errors: list[str]) -> Layout:
        """Lay ``num_workers`` workers out. Append to ``errors`` what is impossible, naming the key to change."""
        return Layout(mesh=Mesh(data_parallel_size=num_workers))

    @classmethod
    def resized(
        cls, options: StrategyConfig, num_workers: int, *, mesh: Mesh, pipeline: PipelineLayout | None
    ) -> StrategyConfig | None:
        """Return ``options`` for an elastic run at another size; None if its workers could not continue at that size.

        ``mesh`` and ``pipeline`` are those of the run's largest size.
        """
        return dataclasses.replace(options, num_workers=num_workers)
