"""``fsdp`` and ``hsdp``: a shard of each tensor of the model on every worker, in one replica or in several.

A replica of ``hsdp`` divides the tensors of the model over its workers. After the backward passes of a step, the
gradients of each shard are summed over its replicas. A lost worker is replaced from a replica of its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.planning.mesh import Mesh
from orchestrator.planning.schedules import PipelineLayout
from orchestrator.strategies.keys import FSDPConfig, HSDPConfig
from orchestrator.strategies.presets.synchronous import Synchronous
from orchestrator.strategies.registry import register

LEAST_SIZE = 2
"""The least number of workers that a tensor is divided over."""


@register("fsdp")
class Shards(Synchronous[FSDPConfig]):
    """A shard of each tensor on every worker."""

    @classmethod
    def replica_size(cls, options: FSDPConfig) -> int:
        return options.group_size

    @classmethod
    def mesh(cls, options: FSDPConfig, num_workers: int, errors: list[str]) -> Mesh:
        shards = options.groups(num_workers, errors)
        if num_workers < 2:
            errors.append(
                f"strategy.num_workers={num_workers}: strategy=fsdp divides the model over at least 2 workers; use "
                "strategy=single for one"
            )
        elif shards * options.context < 2:
            errors.append(
                f"strategy.num_workers={num_workers}: strategy.tensor={options.tensor} leaves nothing to divide over; "
                f"set it to {2 * options.tensor} or more, or use strategy=ddp"
            )
        return Mesh(shard=shards, **options.group_sizes)


@register("hsdp")
class ShardsOfReplicas(Synchronous[HSDPConfig]):
    """A shard of each tensor of one of the replicas of the model on every worker."""

    @classmethod
    def replica_size(cls, options: HSDPConfig) -> int:
        size = options.shard_size
        return (LEAST_SIZE if size == "auto" else size) * options.group_size

    @classmethod
    def default_num_workers(cls, options: HSDPConfig, *, gpus: Sequence[int], spares: int) -> int:
        if options.shard_size == "auto":
            for shards in range(max(gpus, default=0) // options.group_size, 1, -1):
                size = shards * options.group_size
                replicas = min(_replicas_in_nodes(size, gpus), (sum(gpus) - spares) // size)
                if replicas >= 2:
                    return replicas * size
        return super().default_num_workers(options, gpus=gpus, spares=spares)

    @classmethod
    def on_nodes(
        cls, options: HSDPConfig, num_workers: int, *, workers_per_node: Sequence[int]
    ) -> tuple[HSDPConfig, tuple[str, ...]]:
        requested = options.shard_size
        num_workers, per_node = num_workers // options.group_size, [n // options.group_size for n in workers_per_node]
        sizes = [size for size in range(num_workers // 2, 1, -1) if num_workers % size == 0]
        best = next((size for size in sizes if _replicas_in_nodes(size, per_node) * size >= num_workers), None)
        if requested == "auto":
            if not sizes:
                return options, ()
            chosen = best or sizes[0]
            note = f"strategy.shard_size=auto: {chosen}, {_place(num_workers // chosen, best, num_workers, per_node)}"
            return replace(options, shard_size=chosen), (note,)
        if requested not in sizes or best is None or _replicas_in_nodes(requested, per_node) * requested >= num_workers:
            return options, ()
        return options, (
            f"strategy.shard_size={requested}: parameters go through the network, because not every replica has room "
            f"on one node; strategy.shard_size={best} keeps each on one",
        )

    @classmethod
    def resized(
        cls, options: HSDPConfig, num_workers: int, *, mesh: Mesh, pipeline: PipelineLayout | None
    ) -> HSDPConfig | None:
        """Keep the shards: a run loses and gains whole replicas."""
        return replace(options, num_workers=num_workers, shard_size=mesh.shard)

    @classmethod
    def mesh(cls, options: HSDPConfig, num_workers: int, errors: list[str]) -> Mesh:
        before, size = len(errors), cls.replica_size(options)
        options.groups(num_workers, errors)
        replicas, rest = divmod(num_workers, size)
        if len(errors) == before and (rest or replicas < 2):
            nearest = [str(number * size) for number in (replicas, replicas + 1) if number >= 2] or [str(2 * size)]
            by = f"strategy.shard_size={size // options.group_size}"
            by += f" x {options.group_keys}" if options.group_size > 1 else ""
            reason = f"not divisible by {by}" if rest else "makes no replicas of the shards"
            if options.shard_size == "auto":
                reason = "cannot be divided into replicas of two or more workers"
            errors.append(
                f"strategy.num_workers={num_workers}: {reason}; set it to {' or '.join(nearest)}, or use strategy=fsdp "
                "or strategy=ddp, which take any number of workers"
            )
        return Mesh(replicate=max(1, replicas), shard=size // options.group_size, **options.group_sizes)


def _replicas_in_nodes(size: int, per_node: Sequence[int]) -> int:
    """Return how many replicas of ``size`` workers the nodes have room for, each inside one node."""
    return sum(workers // size for workers in per_node)


def _place(replicas: int, best: int | None, num_workers: int, per_node: Sequence[int]) -> str:
    """Return where the replicas are, and what that means; ``best`` is None if they cross nodes."""
    if best is None:
        return f"{replicas} replicas, some of which cross nodes, because no size fits"
    if max(per_node) < num_workers:
        return f"{replicas} replicas, each on one node"
    return f"{replicas} replicas on one node, where strategy=fsdp takes less memory for each worker"
