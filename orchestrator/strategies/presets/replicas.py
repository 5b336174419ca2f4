"""``single`` and ``ddp``: the whole model on each worker."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.planning.mesh import Mesh
from orchestrator.strategies.keys import DDPConfig, SingleConfig
from orchestrator.strategies.presets.synchronous import Synchronous
from orchestrator.strategies.registry import register


@register("single")
class Single(Synchronous[SingleConfig]):
    """One worker, without communication. The baseline of every comparison."""

    @classmethod
    def default_num_workers(cls, options: SingleConfig, *, gpus: Sequence[int], spares: int) -> int:
        return 1

    @classmethod
    def mesh(cls, options: SingleConfig, num_workers: int, errors: list[str]) -> Mesh:
        return Mesh()


@register("ddp")
class Replicas(Synchronous[DDPConfig]):
    """A replica on every worker, whose optimizer state may be divided."""

    @classmethod
    def replica_size(cls, options: DDPConfig) -> int:
        return options.group_size

    @classmethod
    def mesh(cls, options: DDPConfig, num_workers: int, errors: list[str]) -> Mesh:
        replicas = options.groups(num_workers, errors)
        if options.shard_optimizer:
            return Mesh(shard=replicas, **options.group_sizes)
        return Mesh(replicate=replicas, **options.group_sizes)
