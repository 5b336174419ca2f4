"""``ddp_pipeline``: replicas of a pipeline, on a grid of replicas x strategy.pipeline_parallel_size workers.

Each replica is a separate pipeline with its share of the global batch. After the last backward pass of a step, the
gradients of each stage are summed over its replicas.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from orchestrator.config.schema import Config, StrategyConfig, option
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.schedules import PipelineLayout
from orchestrator.strategies.pipelined.layout import GridConfig, at_other_size, pipelines_of, staged
from orchestrator.strategies.pipelined.pipeline import Pipeline
from orchestrator.strategies.registry import register


@dataclass(frozen=True, kw_only=True)
class DDPPipelineConfig(GridConfig):
    """The keys of ``ddp_pipeline``."""

    name: Literal["ddp_pipeline"]
    close: Literal["stages", "replicas"] = option(
        "ranks to place on one node if not all fit: the stages of a pipeline, or the replicas of a stage"
    )


@register("ddp_pipeline")
class DDPPipeline(Pipeline):
    """One stage, or several, of one of the replicas of a pipeline."""

    config_class: ClassVar[type[StrategyConfig]] = DDPPipelineConfig

    @classmethod
    def replica_size(cls, options: StrategyConfig) -> int:
        assert isinstance(options, DDPPipelineConfig)
        return options.pipeline_parallel_size

    @classmethod
    def plan_layout(cls, config: Config, num_workers: int, errors: list[str]) -> Layout:
        options = config.strategy
        assert isinstance(options, DDPPipelineConfig)
        before = len(errors)
        mesh = Mesh(
            replicate=pipelines_of(config, num_workers, errors),
            pipeline=options.pipeline_parallel_size,
            replicas_close=options.close == "replicas",
        )
        return staged(config, mesh, errors, valid_mesh=len(errors) == before, notes=(_placement(options),))

    @classmethod
    def resized(
        cls, options: StrategyConfig, num_workers: int, *, mesh: Mesh, pipeline: PipelineLayout | None
    ) -> StrategyConfig | None:
        assert isinstance(options, DDPPipelineConfig)
        assert pipeline is not None
        of_size = dataclasses.replace(options, num_workers=num_workers)
        replicas = max(1, num_workers // options.pipeline_parallel_size)
        return at_other_size(of_size, mesh, pipeline, replicas=replicas)


def _placement(options: DDPPipelineConfig) -> str:
    if options.close == "replicas":
        return (
            "placement: the replicas of a stage share a node where there is room; a note at the start names the others"
        )
    return "placement: the stages of a pipeline share a node where there is room; a note at the start names the others"
