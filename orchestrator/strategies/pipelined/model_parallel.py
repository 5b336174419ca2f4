"""``model_parallel``: the model cut into one stage per worker, of which one computes at a time.

The naive split, as a baseline for pipelines: a pipeline with a single micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from orchestrator.config.schema import StrategyConfig
from orchestrator.strategies.pipelined.layout import StagedConfig
from orchestrator.strategies.pipelined.pipeline import Pipeline
from orchestrator.strategies.registry import register


@dataclass(frozen=True, kw_only=True)
class ModelParallelConfig(StagedConfig):
    """The keys of ``model_parallel``."""

    name: Literal["model_parallel"]


@register("model_parallel")
class ModelParallel(Pipeline):
    """A stage of the model, without micro-batches."""

    config_class: ClassVar[type[StrategyConfig]] = ModelParallelConfig
