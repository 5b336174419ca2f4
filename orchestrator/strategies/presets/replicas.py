"""``single`` and ``ddp``: the whole model on each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from orchestrator.config.schema import StrategyConfig
from orchestrator.planning.mesh import Mesh
from orchestrator.strategies.presets.synchronous import Synchronous
from orchestrator.strategies.registry import register
from orchestrator.strategies.replicated.ddp_options import ReplicatedConfig


@dataclass(frozen=True, kw_only=True)
class SingleConfig(StrategyConfig):
    """The keys of ``single``. Raises ValueError unless ``num_workers`` is 1 or auto."""

    name: Literal["single"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers not in (1, "auto"):
            raise ValueError(
                f"strategy.num_workers={self.num_workers}: strategy=single has one worker; use strategy=ddp for more"
            )


@register("single")
class Single(Synchronous[SingleConfig]):
    """One worker, without communication. The baseline of every comparison."""

    config_class: ClassVar[type[StrategyConfig]] = SingleConfig

    @classmethod
    def default_num_workers(cls, options: SingleConfig, *, gpus: Sequence[int], spares: int) -> int:
        return 1

    @classmethod
    def mesh(cls, options: SingleConfig, num_workers: int, errors: list[str]) -> Mesh:
        return Mesh()


@dataclass(frozen=True, kw_only=True)
class DDPConfig(ReplicatedConfig):
    """The keys of ``ddp``."""

    elastic = True

    name: Literal["ddp"]


@register("ddp")
class Replicas(Synchronous[DDPConfig]):
    """A replica on every worker, whose optimizer state may be divided."""

    config_class: ClassVar[type[StrategyConfig]] = DDPConfig

    @classmethod
    def replica_size(cls, options: DDPConfig) -> int:
        return options.tensor

    @classmethod
    def mesh(cls, options: DDPConfig, num_workers: int, errors: list[str]) -> Mesh:
        replicas = options.groups(num_workers, errors)
        if options.shard_optimizer:
            return Mesh(shard=replicas, tensor=options.tensor)
        return Mesh(replicate=replicas, tensor=options.tensor)
