"""``hsdp``: replicas of ``fsdp``, on a grid of replicas x strategy.shard_size workers.

Each replica divides the tensors of the model over its workers. After the backward passes of a step, the gradients of
each part are summed over its replicas. A lost worker is replaced from a replica of its part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from orchestrator.config.schema import Config, StrategyConfig, option
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh
from orchestrator.strategies.registry import register
from orchestrator.strategies.sharded.fsdp import FSDP, ShardedConfig


@dataclass(frozen=True, kw_only=True)
class HSDPConfig(ShardedConfig):
    """The keys of ``hsdp``."""

    name: Literal["hsdp"]
    shard_size: int = option(
        "number of workers that each tensor is divided over, as those of one node; the replicas have as many each",
        minimum=2,
    )


@register("hsdp")
class HSDP(FSDP):
    """A part of each tensor of one of the replicas of the model."""

    config_class: ClassVar[type[StrategyConfig]] = HSDPConfig

    @classmethod
    def replica_size(cls, options: StrategyConfig) -> int:
        assert isinstance(options, HSDPConfig)
        return options.shard_size

    @classmethod
    def plan_layout(cls, config: Config, num_workers: int, errors: list[str]) -> Layout:
        options = config.strategy
        assert isinstance(options, HSDPConfig)
        size = options.shard_size
        replicas, rest = divmod(num_workers, size)
        if rest or replicas < 2:
            nearest = [str(number * size) for number in (replicas, replicas + 1) if number >= 2] or [str(2 * size)]
            reason = f"not divisible by strategy.shard_size={size}" if rest else "makes no replicas of the parts"
            errors.append(
                f"strategy.num_workers={num_workers}: {reason}; set it to {' or '.join(nearest)}, or use strategy=fsdp "
                "or strategy=ddp, which take any number of workers"
            )
        return Layout(mesh=Mesh(replicate=max(1, replicas), shard=size))
