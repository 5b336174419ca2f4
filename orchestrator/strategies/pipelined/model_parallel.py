"""``model_parallel``: the model cut into one stage per worker, without micro-batches: one stage computes at a time.

The naive split that a pipeline is compared with. It is a pipeline with a single micro-batch.
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
    name: Literal["model_parallel"]


@register("model_parallel")
class ModelParallel(Pipeline):
    config_class: ClassVar[type[StrategyConfig]] = ModelParallelConfig
