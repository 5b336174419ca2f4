"""The process groups that a strategy forms."""

import torch
import torch.distributed as dist

from helpers.conformance.cases import Case
from helpers.conformance.training import make
from helpers.ranks.gang import own_device


def formed(rank: int, case: Case) -> list[tuple[int, float]]:
    """The size and the timeout in seconds of each group beside the default one."""
    make(case, rank, peer_copy_every=4)
    found = []
    for group in dist.distributed_c10d._world.pg_names:
        if group is not dist.group.WORLD:
            device = own_device() if dist.get_backend(group) == "nccl" else "cpu"
            options = group._get_backend(torch.device(device)).options
            found.append((group.size(), options._timeout.total_seconds()))
    return sorted(found)
