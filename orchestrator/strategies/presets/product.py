"""``mesh``: any product of the dimensions. The other synchronous strategies are cases of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from orchestrator.config.build import option
from orchestrator.config.schema import StrategyConfig
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.schedules import PipelineLayout
from orchestrator.strategies.pipelined.stage_layout import PipelinedConfig, at_other_size
from orchestrator.strategies.presets.synchronous import Synchronous
from orchestrator.strategies.registry import register
from orchestrator.strategies.replicated.ddp_options import ReplicatedConfig
from orchestrator.strategies.sharded.shard_options import ShardedConfig
from orchestrator.strategies.transforms.options import ContextConfig


@dataclass(frozen=True, kw_only=True)
class MeshConfig(ReplicatedConfig, PipelinedConfig, ContextConfig, ShardedConfig):
    """The keys of ``mesh``. Raises ValueError for sizes that make no mesh."""

    name: Literal["mesh"]
    pipeline: int | Literal["auto"] = option("workers that the layers of the model are divided over", minimum=1)
    replicate: int | Literal["auto"] = option("copies of the model; auto: as many as the other sizes leave", minimum=1)
    shard: int | Literal["auto"] = option("workers that each tensor is divided over", minimum=1)
    expert: int = option("workers that the experts of a layer are divided over; 1 for now", minimum=1)

    size_key: ClassVar[str] = "strategy.pipeline"

    def __post_init__(self) -> None:
        super().__post_init__()
        automatic = [name for name, size in self.sizes.items() if size == "auto"]
        if len(automatic) > 1:
            raise ValueError(
                f"{' and '.join(f'strategy.{name}=auto' for name in automatic)}: one size follows from the others and "
                "strategy.num_workers; give a number for all but one"
            )
        if self.expert > 1:
            raise ValueError(
                f"strategy.expert={self.expert}: this dimension comes with a later version; set it to 1, and use "
                f"strategy.shard={self.expert} to divide the model over as many workers"
            )

    @property
    def sizes(self) -> dict[str, int | Literal["auto"]]:
        """The sizes by the names of their dimensions."""
        outer = {"pipeline": self.pipeline, "replicate": self.replicate, "shard": self.shard}
        return {**outer, **self.group_sizes}

    @property
    def known_size(self) -> int:
        """The product of the sizes that are numbers."""
        return math.prod(size for size in self.sizes.values() if size != "auto")

    @property
    def gathers(self) -> bool:
        return (self.shard != 1 or self.context > 1) and not self.shard_optimizer


@register("mesh")
class Product(Synchronous[MeshConfig]):
    """Any product of stages, replicas, shards, parts of samples and parts of layers."""

    config_class: ClassVar[type[StrategyConfig]] = MeshConfig

    @classmethod
    def replica_size(cls, options: MeshConfig) -> int:
        return options.known_size

    @classmethod
    def default_num_workers(cls, options: MeshConfig, *, gpus: Sequence[int], spares: int) -> int:
        if "auto" not in options.sizes.values():
            return options.known_size
        return super().default_num_workers(options, gpus=gpus, spares=spares)

    @classmethod
    def _is_asked_for(cls, options: MeshConfig, num_workers: int) -> bool:
        asked = [name for name, size in options.sizes.items() if size == "auto" and name != "replicate"]
        mesh = cls.mesh(options, num_workers, [])
        return super()._is_asked_for(options, num_workers) and all(mesh.size(name) > 1 for name in asked)

    @classmethod
    def mesh(cls, options: MeshConfig, num_workers: int, errors: list[str]) -> Mesh:
        before = len(errors)
        others, rest = divmod(num_workers, options.known_size)
        automatic = next((name for name, size in options.sizes.items() if size == "auto"), None)
        known = {name: size for name, size in options.sizes.items() if size not in (1, "auto")}
        product = " x ".join(f"strategy.{name}={size}" for name, size in known.items())
        if rest or others == 0 or (automatic is None and others > 1):
            nearest = [str(n * options.known_size) for n in (others, others + 1) if n] if automatic else []
            errors.append(
                f"strategy.num_workers={num_workers}: {product or 'every size 1'} makes {options.known_size}; set it "
                f"to {' or '.join(nearest) or f'{options.known_size}, or one size to auto'}"
            )
        sizes = {name: others or 1 if size == "auto" else size for name, size in options.sizes.items()}
        mesh = Mesh(**sizes, replicas_close=sizes["shard"] > 1 and sizes["replicate"] == 1)
        if mesh.num_shards == 1 and options.shard_optimizer and len(errors) == before:
            errors.append(
                "strategy.shard_optimizer=true: strategy.shard=1 divides nothing; set strategy.shard to the number of "
                "workers over which the optimizer's state is divided"
            )
        return mesh

    @classmethod
    def resized(
        cls, options: MeshConfig, num_workers: int, *, mesh: Mesh, pipeline: PipelineLayout | None
    ) -> MeshConfig | None:
        """Keep the parts, so that a run loses and gains whole replicas. Without replicas, divide the model again."""
        if "auto" in (options.shard, options.pipeline) and mesh.replicate == 1:
            return dataclasses.replace(options, num_workers=num_workers)
        replicas, rest = divmod(num_workers, mesh.num_workers // mesh.replicate)
        if rest or not replicas:
            return None
        of_size = dataclasses.replace(
            options, num_workers=num_workers, pipeline=mesh.pipeline, shard=mesh.shard, replicate=replicas
        )
        return of_size if pipeline is None else at_other_size(of_size, mesh, pipeline, replicas=replicas)
