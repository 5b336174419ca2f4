"""The process groups of a parameter server."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from orchestrator.strategies.base import Context
from orchestrator.strategies.groups import new_group

LONG_TIMEOUT = timedelta(days=30)
"""For waits on ranks that may be many steps behind. The driver's hang detector bounds such waits."""


@dataclass(frozen=True)
class Groups:
    """Groups beside the default one.

    Attributes:
        workers: all workers.
        servers: all servers.
        long_timeout: all ranks, for messages between ranks that may be many steps apart.
        pushes: all ranks, for pushes received in the background. These use connections of their own, so that a server
            that leaves closes the others at once.
        copies: all servers, for their peer copies.
    """

    workers: dist.ProcessGroup
    servers: dist.ProcessGroup
    long_timeout: dist.ProcessGroup
    pushes: dist.ProcessGroup
    copies: dist.ProcessGroup

    @staticmethod
    def form(context: Context) -> Groups:
        """Create all groups. Collective: every rank creates them in the same order."""
        mesh = context.mesh
        return Groups(
            workers=new_group(context, range(mesh.num_workers)),
            servers=new_group(context, mesh.servers),
            long_timeout=new_group(context, timeout=LONG_TIMEOUT),
            pushes=new_group(context, timeout=LONG_TIMEOUT),
            copies=new_group(context, mesh.servers),
        )
