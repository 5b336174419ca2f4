"""A dimension that does nothing: CONTRIBUTING.md shows with it what a new one takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from orchestrator.config.schema import StrategyConfig, option
from orchestrator.planning.mesh import Mesh
from orchestrator.strategies.presets.synchronous import Synchronous
from orchestrator.strategies.registry import register
from orchestrator.strategies.sharded.options import ShardedConfig


@dataclass(frozen=True, kw_only=True)
class IdleConfig(ShardedConfig):
    """The keys of ``idle``."""

    name: Literal["idle"]
    context: int = option("workers that compute the same", minimum=1)


@register("idle")
class Idle(Synchronous[IdleConfig]):
    """Shards, each on several workers that have the same of the model and of the batch."""

    config_class: ClassVar[type[StrategyConfig]] = IdleConfig

    @classmethod
    def mesh(cls, options: IdleConfig, num_workers: int, errors: list[str]) -> Mesh:
        return Mesh(shard=num_workers // options.context, context=options.context)
