"""What workers and servers agree on when a run recovers: the step, the optimizer's settings and the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.planning.mesh import Mesh
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import CPU, broadcast_json


def share_meta(own: Mapping[str, Any] | None, *, mesh: Mesh, rank: int) -> dict[str, Any]:
    """Return the ``meta`` of the first rank that has it, on every rank. Collective.

    Args:
        own: the ``meta`` of this rank's state after the step to recover, or None if it has no such state.
        mesh: the grid of ranks.
        rank: this global rank.
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
