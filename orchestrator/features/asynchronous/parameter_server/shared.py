"""What the workers and servers of a parameter server share: keys, process groups, and what they agree on to recover."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.planning.mesh import Mesh
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import CPU, broadcast_json
from orchestrator.strategies.groups import new_group
from orchestrator.strategies.rank_context import Context

LONG_TIMEOUT = timedelta(days=30)
"""For waits on ranks that may be many steps behind. The driver's hang detector bounds such waits."""


@dataclass(frozen=True)
class Groups:
    """Groups beside the default one.

    Attributes:
        long_timeout: all ranks, for messages between ranks that may be many steps apart.
        pushes: all ranks, for pushes received in the background. These use connections of their own, so that a server
            that leaves closes the others at once.
    """

    workers: dist.ProcessGroup
    servers: dist.ProcessGroup
    long_timeout: dist.ProcessGroup
    pushes: dist.ProcessGroup

    @staticmethod
    def form(context: Context) -> Groups:
        """Create all groups. Collective: every rank creates them in the same order."""
        mesh = context.mesh
        return Groups(
            workers=new_group(context, range(mesh.num_workers)),
            servers=new_group(context, mesh.servers),
            long_timeout=new_group(context, timeout=LONG_TIMEOUT),
            pushes=new_group(context, timeout=LONG_TIMEOUT),
        )


def share_meta(own: Mapping[str, Any] | None, *, mesh: Mesh, rank: int) -> dict[str, Any]:
    """Return the ``meta`` of the first rank that has it, on every rank. Collective.

    Args:
        own: the ``meta`` of this rank's state after the step to recover, or None if it has no such state.
    """
    first = torch.tensor(mesh.world_size if own is None else rank)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    meta: dict[str, Any] = broadcast_json(own, source=int(first), rank=rank, device=CPU)
    return meta


def with_settings(state: TrainState, meta: Mapping[str, Any]) -> TrainState:
    """Return ``state`` with the step, the optimizer's settings and the schedule of another rank's ``meta``."""
    groups = [
        {**theirs, "params": own["params"]}
        for theirs, own in zip(meta["param_groups"], state.meta["param_groups"], strict=True)
    ]
    taken = {name: meta[name] for name in ("step", "samples_consumed", "scheduler")}
    return replace(state, meta={**state.meta, **taken, "param_groups": groups})
