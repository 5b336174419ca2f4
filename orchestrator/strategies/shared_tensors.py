"""Tensors that belong to stages on several ranks, such as an embedding table tied to the output layer.

Each of these ranks keeps a copy and applies the same update, with the sum of their gradients. The rank of the first
stage saves the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.model.stages import Shared
from orchestrator.strategies.base import Context
from orchestrator.strategies.groups import new_group


class Sharing:
    """The tensors that one rank shares with other ranks of its pipeline.

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
            context: of this rank.
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
