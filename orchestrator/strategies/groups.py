"""Process groups beside the default one. Every rank calls these functions, in the same order.

torch would give them a timeout of its own, of 10 or 30 minutes, instead of the timeout of the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from orchestrator.compat.process_groups import new_nccl_group
from orchestrator.planning.mesh import Dimension
from orchestrator.strategies.base import Context


def new_group(
    context: Context,
    ranks: Sequence[int] | None = None,
    *,
    backend: Literal["gloo"] | None = None,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """Form a group of some ranks.

    Args:
        context: of this rank.
        ranks: the global ranks; None for all.
        backend: None for the backend of the default group.
        timeout: of each operation; None for that of the run.

    Returns:
        The group. A rank outside it gets torch's stand-in, which no operation accepts.
    """
    members = list(range(dist.get_world_size()) if ranks is None else ranks)
    timeout = timeout or _timeout(context)
    if context.device.type == "cuda" and backend is None:
        return new_nccl_group(members, timeout=timeout)
    return cast(dist.ProcessGroup, dist.new_group(members, timeout=timeout, backend=backend))


def check_equal(found: Any, group: dist.ProcessGroup, device: torch.device, *, what: str) -> None:
    """Check that all ranks of a group have found the same. Collective.

    Args:
        found: has a ``repr`` that is the same in every process.
        group: the ranks.
        device: for the exchange.
        what: the key, and what has been found.

    Raises:
        RuntimeError: they have not.
    """
    number = int.from_bytes(hashlib.blake2b(repr(found).encode(), digest_size=4).digest(), "big")
    numbers = torch.tensor([number, -number], device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    if numbers.sum():
        raise RuntimeError(f"{what} differ between the workers")


class MeshGroups:
    """The process groups of a rank along dimensions of its mesh, in one generation.

    A communicator of NCCL takes memory and an abort of its own, so there are no others than are needed: none for a rank
    that is alone, the default group for all ranks, and one for equal sets of ranks.
    """

    def __init__(self, context: Context):
        self._context = context
        self._found: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def over(self, *axes: Dimension) -> dist.ProcessGroup | None:
        """Return the group of the ranks that differ at most in these dimensions; None if this rank is alone in it.

        Collective, when it is first asked for.
        """
        parts = tuple(tuple(ranks) for ranks in self._context.mesh.groups(axes))
        if len(parts) == 1:
            return dist.group.WORLD
        if all(len(ranks) == 1 for ranks in parts):
            return None
        if parts not in self._found:
            self._found[parts] = divided(self._context, parts)
        return self._found[parts]


def divided(
    context: Context, parts: Sequence[Sequence[int]], *, backend: Literal["gloo"] | None = None
) -> dist.ProcessGroup:
    """Divide all ranks into ``parts`` of one size, and return a new group of the ranks in this rank's part.

    ``backend``: None for that of the default group.
    """
    groups = [new_group(context, ranks, backend=backend) for ranks in parts]
    return next(group for group, ranks in zip(groups, parts, strict=True) if context.global_rank in ranks)


def _timeout(context: Context) -> timedelta:
    return timedelta(seconds=context.collective_timeout_s)
