"""``ddp_pipeline``: replicas of a pipeline, on a grid of data_parallel_size x pipeline_parallel_size workers.

Each replica is a pipeline of its own, with its share of the global batch. After the last backward pass the gradients
of a stage are summed over its replicas.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from orchestrator.config.schema import Config, StrategyConfig, option
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.schedules import PipelineLayout
from orchestrator.strategies.pipelined.layout import PipelinedConfig, staged
from orchestrator.strategies.pipelined.pipeline import Pipeline
from orchestrator.strategies.registry import register


@dataclass(frozen=True, kw_only=True)
class DDPPipelineConfig(PipelinedConfig):
    name: Literal["ddp_pipeline"]
    pipeline_parallel_size: int = option("workers of each pipeline", minimum=2)
    close: Literal["stages", "replicas"] = option(
        "what shares a node where not everything does: the stages of a pipeline, or the replicas of a stage"
    )


@register("ddp_pipeline")
class DDPPipeline(Pipeline):
    config_class: ClassVar[type[StrategyConfig]] = DDPPipelineConfig
    size_key = "strategy.pipeline_parallel_size"

    @classmethod
    def default_num_workers(cls, options: StrategyConfig, *, num_gpus: int) -> int:
        assert isinstance(options, DDPPipelineConfig)
        return num_gpus or 2 * options.pipeline_parallel_size

    @classmethod
    def plan_layout(cls, config: Config, num_workers: int, errors: list[str]) -> Layout:
        options = config.strategy
        assert isinstance(options, DDPPipelineConfig)
        p = options.pipeline_parallel_size
        fits = num_workers % p == 0
        if not fits:
            near = " or ".join(str(n) for n in (num_workers // p * p, (num_workers // p + 1) * p) if n)
            errors.append(
                f"strategy.num_workers={num_workers}: not divisible by strategy.pipeline_parallel_size={p}; "
                f"set it to {near}"
            )
        mesh = Mesh(
            data_parallel_size=max(1, num_workers // p),
            pipeline_parallel_size=p,
            replicas_close=options.close == "replicas",
        )
        return staged(config, mesh, errors, fits=fits, notes=(_placement(options),))

    @classmethod
    def resized(
        cls, options: StrategyConfig, num_workers: int, *, mesh: Mesh, pipeline: PipelineLayout | None
    ) -> StrategyConfig | None:
        """Give fewer replicas more micro-batches, not larger ones: what flows between stages keeps its shape."""
        assert isinstance(options, DDPPipelineConfig)
        assert pipeline is not None
        replicas = max(1, num_workers // options.pipeline_parallel_size)
        microbatches, rest = divmod(pipeline.num_microbatches * mesh.data_parallel_size, replicas)
        if rest:
            return None
        return dataclasses.replace(options, num_workers=num_workers, num_microbatches=microbatches)


def _placement(options: DDPPipelineConfig) -> str:
    if options.close == "replicas":
        return "placement: the replicas of a stage share a node where not everything does: gradients stay inside it"
    return "placement: the stages of a pipeline share a node where not everything does: activations stay inside it"
