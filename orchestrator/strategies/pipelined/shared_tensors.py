"""Tensors that stages on several workers have: the table of an embedding that is the output layer's too, say.

Each of the workers keeps one and makes the same update with the sum of their gradients. The worker of the first
stage counts it in the gradient's norm and saves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.model.stages import Shared
from orchestrator.planning.mesh import Mesh


class Sharing:
    """What the worker ``global_rank`` has in common with others of its pipeline.

    ``own``: its tensors by name, a shared one under each. ``first_names``: its names for parameters that another
    worker saves, each with the first name there. ``saved_elsewhere``: those of its names that are saved there.
    ``counted_elsewhere``: parameters whose gradient another worker counts.
    """

    def __init__(
        self,
        shared: Sequence[Shared],
        own: Mapping[str, Tensor],
        *,
        mesh: Mesh,
        global_rank: int,
        stage_ranks: Sequence[int],
    ):
        self.first_names: dict[str, str] = {}
        self.saved_elsewhere: set[str] = set()
        self.counted_elsewhere: set[Tensor] = set()
        self._recoverable_steps: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for tensor in shared:
            ranks = [stage_ranks[stage] for stage in tensor.stages]
            for dp_rank in range(mesh.data_parallel_size if len(set(ranks)) > 1 else 0):
                holders = tuple(sorted({mesh.global_rank(dp_rank=dp_rank, pp_rank=rank) for rank in ranks}))
                if holders not in groups:
                    groups[holders] = dist.new_group(holders)
                if global_rank in holders:
                    names = tensor.names_on(stage_ranks, mesh.pp_rank(global_rank))
                    parameter = own[names[0]]
                    if isinstance(parameter, nn.Parameter):
                        self._recoverable_steps.append((parameter, groups[holders]))
                    if mesh.pp_rank(global_rank) != ranks[0]:
                        self._leave_to_first(parameter, names, tensor.names_on(stage_ranks, ranks[0]))

    def _leave_to_first(self, tensor: Tensor, names: Sequence[str], names_there: Sequence[str]) -> None:
        self.saved_elsewhere |= set(names) & set(names_there)
        if isinstance(tensor, nn.Parameter):
            self.first_names |= dict.fromkeys(names, names_there[0])
            self.counted_elsewhere.add(tensor)

    @torch.no_grad()
    def sync_initial_state(self) -> None:
        """Give each parameter the numbers that the first of its workers has."""
        for parameter, group in self._recoverable_steps:
            dist.broadcast(parameter, group=group, group_src=0)

    def add_gradients(self) -> None:
        """Replace the gradient of each parameter by its sum over the workers that have it, a dense one: it may be
        sparse in one stage and dense in another."""
        for parameter, group in self._recoverable_steps:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:  # one of the stages makes no use of it
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            dist.all_reduce(parameter.grad, group=group)
