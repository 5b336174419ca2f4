"""The grid of ranks, and how a number of things is shared out over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """``data_parallel_size`` x ``pipeline_parallel_size`` workers; ``num_shards`` ranks after them hold parameters.

    The ranks of one pipeline are neighbours, ``global_rank = dp_rank * pipeline_parallel_size + pp_rank``; with
    ``replicas_close`` those of one stage are, ``global_rank = pp_rank * data_parallel_size + dp_rank``.
    """

    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    replicas_close: bool = False
    num_shards: int = 0

    @property
    def num_workers(self) -> int:
        return self.data_parallel_size * self.pipeline_parallel_size

    @property
    def world_size(self) -> int:
        return self.num_workers + self.num_shards

    @property
    def shards(self) -> range:
        """The global ranks that hold parameters."""
        return range(self.num_workers, self.world_size)

    def shard(self, global_rank: int) -> int | None:
        """The number of the shard that a rank holds; None: it is a worker."""
        return global_rank - self.num_workers if global_rank in self.shards else None

    def dp_rank(self, global_rank: int) -> int:
        """Of a shard, which has no data of its own: 0."""
        if global_rank in self.shards:
            return 0
        if self.replicas_close:
            return global_rank % self.data_parallel_size
        return global_rank // self.pipeline_parallel_size

    def pp_rank(self, global_rank: int) -> int:
        if self.replicas_close:
            return global_rank // self.data_parallel_size
        return global_rank % self.pipeline_parallel_size

    def global_rank(self, *, dp_rank: int, pp_rank: int) -> int:
        if self.replicas_close:
            return pp_rank * self.data_parallel_size + dp_rank
        return dp_rank * self.pipeline_parallel_size + pp_rank

    def pipeline(self, dp_rank: int) -> list[int]:
        """The global ranks of a pipeline, by ``pp_rank``."""
        return [self.global_rank(dp_rank=dp_rank, pp_rank=p) for p in range(self.pipeline_parallel_size)]

    def replicas(self, pp_rank: int) -> list[int]:
        """The global ranks of the replicas of a stage, by ``dp_rank``."""
        return [self.global_rank(dp_rank=d, pp_rank=pp_rank) for d in range(self.data_parallel_size)]

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """The ``torch.distributed`` mesh with dimensions ``dp`` and ``pp``; needs a process group."""
        from torch.distributed.device_mesh import DeviceMesh

        grid = [self.pipeline(dp_rank) for dp_rank in range(self.data_parallel_size)]
        return DeviceMesh(device_type, grid, mesh_dim_names=("dp", "pp"))


def even_shares(total: int, parts: int) -> tuple[int, ...]:
    """``total`` things over ``parts``: sizes that differ by at most one, the larger ones first."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))
