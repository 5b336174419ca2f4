"""``mesh``: any product of the dimensions. The other synchronous strategies are cases of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from orchestrator.planning.mesh import Mesh
from orchestrator.planning.schedules import PipelineLayout
from orchestrator.strategies.keys import MeshConfig
from orchestrator.strategies.parts.stage_layout import at_other_size
from orchestrator.strategies.presets.synchronous import Synchronous
from orchestrator.strategies.registry import register


@register("mesh")
class Product(Synchronous[MeshConfig]):
    """Any product of stages, replicas, shards, parts of samples and parts of layers."""

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
        return super()._is_asked_for(options, num_workers) and all(getattr(mesh, name) > 1 for name in asked)

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
