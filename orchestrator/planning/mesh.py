"""The grid of ranks, and even shares of the batch over it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The grid of ``data_parallel_size`` x ``pipeline_parallel_size`` workers, followed by parameter shards.

    By default the ranks of one pipeline are consecutive: ``global_rank = dp_rank * pipeline_parallel_size + pp_rank``.
    With ``replicas_close`` the replicas of one stage are: ``global_rank = pp_rank * data_parallel_size + dp_rank``.
    The last ``num_shards`` ranks hold parameters for the workers.
    """

    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    replicas_close: bool = False
    num_shards: int = 0

    @property
    def num_workers(self) -> int:
        """The number of ranks that train."""
        return self.data_parallel_size * self.pipeline_parallel_size

    @property
    def world_size(self) -> int:
        """The number of workers and shards."""
        return self.num_workers + self.num_shards

    @property
    def shards(self) -> range:
        """The global ranks that hold parameters."""
        return range(self.num_workers, self.world_size)

    def shard(self, global_rank: int) -> int | None:
        """Return the index of the shard on ``global_rank``; None if the rank is a worker."""
        return global_rank - self.num_workers if global_rank in self.shards else None

    def dp_rank(self, global_rank: int) -> int:
        """Return the index of the replica that ``global_rank`` belongs to; 0 for a shard, which reads no data."""
        if global_rank in self.shards:
            return 0
        if self.replicas_close:
            return global_rank % self.data_parallel_size
        return global_rank // self.pipeline_parallel_size

    def pp_rank(self, global_rank: int) -> int:
        """Return the position of ``global_rank`` in its pipeline."""
        if self.replicas_close:
            return global_rank // self.data_parallel_size
        return global_rank % self.pipeline_parallel_size

    def global_rank(self, *, dp_rank: int, pp_rank: int) -> int:
        """Return the rank at a position of the grid."""
        if self.replicas_close:
            return pp_rank * self.data_parallel_size + dp_rank
        return dp_rank * self.pipeline_parallel_size + pp_rank

    def pipeline(self, dp_rank: int) -> list[int]:
        """Return the global ranks of a pipeline, ordered by ``pp_rank``."""
        return [self.global_rank(dp_rank=dp_rank, pp_rank=p) for p in range(self.pipeline_parallel_size)]

    def replicas(self, pp_rank: int) -> list[int]:
        """Return the global ranks of the replicas of a stage, ordered by ``dp_rank``."""
        return [self.global_rank(dp_rank=d, pp_rank=pp_rank) for d in range(self.data_parallel_size)]

    @property
    def close_groups(self) -> list[list[int]]:
        """The groups of ranks that should share a node: pipelines, or with ``replicas_close`` the replicas of a stage.

        Consecutive ranks, in ascending order.
        """
        if self.replicas_close:
            return [self.replicas(pp_rank) for pp_rank in range(self.pipeline_parallel_size)]
        return [self.pipeline(dp_rank) for dp_rank in range(self.data_parallel_size)]


def even_shares(total: int, parts: int) -> tuple[int, ...]:
    """Divide ``total`` into ``parts`` sizes that differ by at most one, the larger ones first."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def share_sizes(total: int, parts: int) -> set[int]:
    """Return the sizes that occur in :func:`even_shares`, without listing all shares."""
    size, rest = divmod(total, parts)
    return {size, size + 1} if rest else {size}
