"""The grid of ranks, and how a number of things is shared out over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """``data_parallel_size`` x ``pipeline_parallel_size`` ranks; the ranks of one pipeline are neighbours.

    ``global_rank = dp_rank * pipeline_parallel_size + pp_rank``.
    """

    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.pipeline_parallel_size

    def dp_rank(self, global_rank: int) -> int:
        return global_rank // self.pipeline_parallel_size

    def pp_rank(self, global_rank: int) -> int:
        return global_rank % self.pipeline_parallel_size

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """The ``torch.distributed`` mesh with dimensions ``dp`` and ``pp``; needs a process group."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = (self.data_parallel_size, self.pipeline_parallel_size)
        return init_device_mesh(device_type, shape, mesh_dim_names=("dp", "pp"))


def even_shares(total: int, parts: int) -> tuple[int, ...]:
    """``total`` things over ``parts``: sizes that differ by at most one, the larger ones first."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))
