"""Process groups beside the default one, and tensors that belong to stages on several ranks.

Every rank calls the functions that form groups, in the same order.

torch would give them a timeout of its own, of 10 or 30 minutes, instead of the timeout of the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.compat.process_groups import new_nccl_group
from orchestrator.model.stages.own_stages import Shared
from orchestrator.planning.mesh import Dimension
from orchestrator.strategies.rank_context import Context


def new_group(
    context: Context,
    ranks: Sequence[int] | None = None,
    *,
    backend: Literal["gloo"] | None = None,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """Form a group of some ranks.

    Args:
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


class Sharing:
    """The tensors that one rank shares with other ranks of its pipeline, such as an embedding tied to the output layer.

    Each of these ranks keeps a copy and applies the same update, with the sum of their gradients. The rank of the first
    stage saves the tensor.

    Attributes:
        first_names: this rank's names of parameters that another rank saves, each mapped to its first name there.
        saved_elsewhere: the names of this rank's tensors that another rank saves under the same name.
    """

    def __init__(self) -> None:
        """Share nothing."""
        self.first_names: dict[str, str] = {}
        self.saved_elsewhere: set[str] = set()
        self._shared: list[tuple[nn.Parameter, dist.ProcessGroup]] = []

    @classmethod
    def of(
        cls, shared: Sequence[Shared], own: Mapping[str, Tensor], *, context: Context, stage_ranks: Sequence[int]
    ) -> Sharing:
        """Form a process group for each set of ranks that share a tensor. Collective over the default group.

        Args:
            shared: all tensors that several stages have.
            own: this rank's tensors by name; a shared tensor appears under each of its names.
            stage_ranks: the ``pp_rank`` of each stage.
        """
        sharing = cls()
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        mesh, global_rank = context.mesh, context.global_rank
        for tensor in shared:
            ranks = [stage_ranks[stage] for stage in tensor.stages]
            for pipeline in mesh.groups("pipeline") if len(set(ranks)) > 1 else ():
                holders = tuple(sorted({pipeline[rank] for rank in ranks}))
                if holders not in groups:
                    groups[holders] = new_group(context, holders)
                if global_rank in holders:
                    names = tensor.names_on(stage_ranks, mesh.coords(global_rank).pipeline)
                    parameter = own[names[0]]
                    if isinstance(parameter, nn.Parameter):
                        sharing._shared.append((parameter, groups[holders]))
                    if mesh.coords(global_rank).pipeline != ranks[0]:
                        sharing._leave_to_first(parameter, names, tensor.names_on(stage_ranks, ranks[0]))
        return sharing

    def _leave_to_first(self, tensor: Tensor, names: Sequence[str], names_there: Sequence[str]) -> None:
        self.saved_elsewhere |= set(names) & set(names_there)
        if isinstance(tensor, nn.Parameter):
            self.first_names |= dict.fromkeys(names, names_there[0])

    @torch.no_grad()
    def sync_initial_state(self) -> None:
        """Copy each shared parameter from the first of its ranks to the others."""
        for parameter, group in self._shared:
            dist.broadcast(parameter, group=group, group_src=0)

    def add_gradients(self) -> None:
        """Replace the gradient of each shared parameter by its sum over the ranks that have it.

        The result is dense, because a gradient may be sparse in one stage and dense in another.
        """
        for parameter, group in self._shared:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:  # this rank's stages did not use the parameter
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            dist.all_reduce(parameter.grad, group=group)


NOTHING_SHARED = Sharing()
