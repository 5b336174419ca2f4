"""``hsdp``: replicas of ``fsdp``, on a grid of replicas x strategy.shard_size workers.

Each replica divides the tensors of the model over its workers. After the backward passes of a step, the gradients of
each part are summed over its replicas. A lost worker is replaced from a replica of its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from orchestrator.config.schema import Config, StrategyConfig, option
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.schedules import PipelineLayout
from orchestrator.strategies.registry import register
from orchestrator.strategies.sharded.fsdp import FSDP
from orchestrator.strategies.sharded.options import ShardedConfig

LEAST_SIZE = 2
"""The least number of workers that a tensor is divided over."""


@dataclass(frozen=True, kw_only=True)
class HSDPConfig(ShardedConfig):
    """The keys of ``hsdp``."""

    elastic = True

    name: Literal["hsdp"]
    shard_size: int | Literal["auto"] = option(
        "number of workers that each tensor is divided over; the replicas have as many each; auto: those of a node",
        minimum=LEAST_SIZE,
    )


@register("hsdp")
class HSDP(FSDP):
    """A shard of each tensor of one of the replicas of the model."""

    config_class: ClassVar[type[StrategyConfig]] = HSDPConfig

    @classmethod
    def replica_size(cls, options: StrategyConfig) -> int:
        size = _options(options).shard_size
        return LEAST_SIZE if size == "auto" else size

    @classmethod
    def default_num_workers(cls, options: StrategyConfig, *, gpus: Sequence[int], spares: int) -> int:
        if _options(options).shard_size == "auto":
            for size in range(max(gpus, default=0), 1, -1):
                replicas = min(_replicas_in_nodes(size, gpus), (sum(gpus) - spares) // size)
                if replicas >= 2:
                    return replicas * size
        return super().default_num_workers(options, gpus=gpus, spares=spares)

    @classmethod
    def on_nodes(
        cls, options: StrategyConfig, num_workers: int, *, room: Sequence[int]
    ) -> tuple[StrategyConfig, tuple[str, ...]]:
        requested = _options(options).shard_size
        sizes = [size for size in range(num_workers // 2, 1, -1) if num_workers % size == 0]
        best = next((size for size in sizes if _replicas_in_nodes(size, room) * size >= num_workers), None)
        if requested == "auto":
            if not sizes:
                return options, ()
            chosen = best or sizes[0]
            note = f"strategy.shard_size=auto: {chosen}, {_place(num_workers // chosen, best, num_workers, room)}"
            return replace(_options(options), shard_size=chosen), (note,)
        if requested not in sizes or best is None or _replicas_in_nodes(requested, room) * requested >= num_workers:
            return options, ()
        return options, (
            f"strategy.shard_size={requested}: parameters go through the network, because not every replica has room "
            f"on one node; strategy.shard_size={best} keeps each on one",
        )

    @classmethod
    def resized(
        cls, options: StrategyConfig, num_workers: int, *, mesh: Mesh, pipeline: PipelineLayout | None
    ) -> StrategyConfig | None:
        """Keep the shards: a run loses and gains whole replicas."""
        return replace(_options(options), num_workers=num_workers, shard_size=mesh.shard)

    @classmethod
    def plan_layout(cls, config: Config, num_workers: int, errors: list[str]) -> Layout:
        size = cls.replica_size(config.strategy)
        replicas, rest = divmod(num_workers, size)
        if rest or replicas < 2:
            nearest = [str(number * size) for number in (replicas, replicas + 1) if number >= 2] or [str(2 * size)]
            reason = f"not divisible by strategy.shard_size={size}" if rest else "makes no replicas of the shards"
            if _options(config.strategy).shard_size == "auto":
                reason = "cannot be divided into replicas of two or more workers"
            errors.append(
                f"strategy.num_workers={num_workers}: {reason}; set it to {' or '.join(nearest)}, or use strategy=fsdp "
                "or strategy=ddp, which take any number of workers"
            )
        return Layout(mesh=Mesh(replicate=max(1, replicas), shard=size))


def _replicas_in_nodes(size: int, room: Sequence[int]) -> int:
    """Return how many replicas of ``size`` workers the nodes have room for, each inside one node."""
    return sum(workers // size for workers in room)


def _place(replicas: int, best: int | None, num_workers: int, room: Sequence[int]) -> str:
    """Return where the replicas are, and what that means; ``best`` is None if they cross nodes."""
    if best is None:
        return f"{replicas} replicas, some of which cross nodes, because no size fits"
    if max(room) < num_workers:
        return f"{replicas} replicas, each on one node"
    return f"{replicas} replicas on one node, where strategy=fsdp takes less memory for each worker"


def _options(options: StrategyConfig) -> HSDPConfig:
    assert isinstance(options, HSDPConfig)
    return options
