"""``model_parallel``, ``pipeline``, ``ddp_pipeline`` and ``fsdp_pipeline``: the model is cut into stages.

``model_parallel`` is the naive split, a baseline: one worker computes at a time. A replica of ``ddp_pipeline`` is a
pipeline of its own with its share of the global batch. A stage of ``fsdp_pipeline`` is on several workers, which train
on other samples and have a shard of each tensor of the stage.
"""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

from orchestrator.config.schema import TrainConfig
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.schedules import PipelineLayout
from orchestrator.strategies.keys import (
    DDPPipelineConfig,
    FSDPPipelineConfig,
    GridConfig,
    ModelParallelConfig,
    PipelineConfig,
    StagedConfig,
)
from orchestrator.strategies.parts.stage_layout import at_other_size
from orchestrator.strategies.presets.synchronous import Synchronous
from orchestrator.strategies.registry import register

S = TypeVar("S", bound=StagedConfig)
G = TypeVar("G", bound=GridConfig)


class _OnePipeline(Synchronous[S], Generic[S]):
    """A worker for each stage."""

    @classmethod
    def mesh(cls, options: S, num_workers: int, errors: list[str]) -> Mesh:
        stages = options.groups(num_workers, errors)
        if num_workers < 2:
            errors.append(
                f"strategy.num_workers={num_workers}: strategy={options.name} needs at least 2, one per stage; "
                "use strategy=single for one"
            )
        elif stages < 2:
            errors.append(
                f"strategy.num_workers={num_workers}: {options.group_keys} leaves one stage; set it to "
                f"{2 * options.group_size} or more, or use strategy=fsdp"
            )
        return Mesh(pipeline=stages, **options.group_sizes)


@register("model_parallel")
class ModelParallel(_OnePipeline[ModelParallelConfig]):
    """Stages of one micro-batch."""


@register("pipeline")
class OnePipeline(_OnePipeline[PipelineConfig]):
    """Stages that compute at the same time, on micro-batches."""


class _Grid(Synchronous[G], Generic[G]):
    """Several workers for each stage."""

    @classmethod
    def replica_size(cls, options: G) -> int:
        return options.pipeline_parallel_size * options.group_size

    @classmethod
    def pipelines(cls, options: G, num_workers: int, errors: list[str]) -> int:
        """Return how many pipelines ``num_workers`` workers make; append an error if some are left over."""
        size, by = cls.replica_size(options), f"strategy.pipeline_parallel_size={options.pipeline_parallel_size}"
        by += f" x {options.group_keys}" if options.group_size > 1 else ""
        if num_workers % size:
            nearest = " or ".join(str(n) for n in (num_workers // size * size, (num_workers // size + 1) * size) if n)
            errors.append(f"strategy.num_workers={num_workers}: not divisible by {by}; set it to {nearest}")
        return max(1, num_workers // size)


@register("ddp_pipeline")
class Pipelines(_Grid[DDPPipelineConfig]):
    """Replicas of a pipeline."""

    fewest_replicas = 2

    @classmethod
    def mesh(cls, options: DDPPipelineConfig, num_workers: int, errors: list[str]) -> Mesh:
        return Mesh(
            replicate=cls.pipelines(options, num_workers, errors),
            pipeline=options.pipeline_parallel_size,
            **options.group_sizes,
            replicas_close=options.close == "replicas",
        )

    @classmethod
    def plan_layout(cls, options: DDPPipelineConfig, train: TrainConfig, num_workers: int, errors: list[str]) -> Layout:
        close = "stages of a pipeline" if options.close == "stages" else "replicas of a stage"
        note = f"placement: the {close} share a node where there is room; a note at the start names the others"
        return dataclasses.replace(super().plan_layout(options, train, num_workers, errors), notes=(note,))

    @classmethod
    def resized(
        cls, options: DDPPipelineConfig, num_workers: int, *, mesh: Mesh, pipeline: PipelineLayout | None
    ) -> DDPPipelineConfig | None:
        """Keep the stages: a run loses and gains whole pipelines."""
        assert pipeline is not None
        of_size = dataclasses.replace(options, num_workers=num_workers)
        return at_other_size(of_size, mesh, pipeline, replicas=max(1, num_workers // cls.replica_size(options)))


@register("fsdp_pipeline")
class ShardedStages(_Grid[FSDPPipelineConfig]):
    """Stages of which each worker has a shard."""

    @classmethod
    def mesh(cls, options: FSDPPipelineConfig, num_workers: int, errors: list[str]) -> Mesh:
        before = len(errors)
        shards = cls.pipelines(options, num_workers, errors)
        if shards * options.context == 1 and len(errors) == before:
            errors.append(
                f"strategy.num_workers={num_workers}: leaves one worker for each stage, which has nothing to divide; "
                f"set it to {2 * cls.replica_size(options)} or more, or use strategy=pipeline"
            )
        return Mesh(
            pipeline=options.pipeline_parallel_size,
            shard=shards,
            **options.group_sizes,
            replicas_close=True,
        )
