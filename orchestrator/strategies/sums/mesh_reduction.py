"""The gradients of several ranks: what is summed over whom follows from the placements of the tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.planning.mesh import BATCH, DIVIDING, WITHIN_STAGE, Axes
from orchestrator.planning.placement import Placement
from orchestrator.state.transport import broadcast_tensors
from orchestrator.strategies.groups import NOTHING_SHARED, MeshGroups, Sharing
from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.owner import Own
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.reduction import Reduction, Weight, on_device, weight_sum
from orchestrator.strategies.sums.sums import Sums
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.update.gradients import norm_over, sum_over
from orchestrator.strategies.update.whole_tensors import ShardMap


class MeshReduction(Reduction):
    """The reduction of one rank, in the process groups of one generation.

    Attributes:
        batch: the ranks that compute the same of the model, of other samples; None if there are no others.
        waits: what a step waits for after its backward passes.
    """

    def __init__(
        self,
        context: Context,
        trained: Trained,
        groups: MeshGroups,
        sums: Sums,
        *,
        owner: Own,
        sharing: Sharing = NOTHING_SHARED,
    ):
        """Prepare for the sums of what is ``trained``. Collective.

        Args:
            groups: those of this generation.
            sums: makes the first of the sums.
            owner: has the elements that this rank updates.
            sharing: the tensors that belong to stages on several ranks.
        """
        self.context = context
        self.trained = trained
        self.groups = groups
        self.batch = groups.over(*BATCH)
        named = trained.module().named_parameters(remove_duplicate=False)
        self._named = dict(named)
        self._placements: Mapping[Tensor, Placement] = {p: trained.placements[n] for n, p in self._named.items()}
        if trained.needs_whole:
            self.shard_map = self._shard_map()
        self.averages_over = sums.averages_over
        # Replicas provide the state of a lost rank; where no rank has a part alone, any other one does.
        self.settles = context.mesh.replicate > 1 and context.mesh.is_divided
        self.waits = WaitTimer(context.device, counts=False)
        self._sums = sums
        self._owner = owner
        self._sharing = sharing
        remaining = {*sums.remaining}
        others = [p for p in trained.parameters if p not in remaining and self._placements[p].partial]
        self._remaining = [
            *self._by_group(sums.remaining, lambda placement: placement.summed_over),
            *self._by_group(others, lambda placement: placement.partial),
        ]

    @contextlib.contextmanager
    def of(self, context: Context) -> Iterator[None]:
        before, self.context = self.context, context
        try:
            yield
        finally:
            self.context = before

    @torch.no_grad()
    def sync_initial_state(self) -> None:
        """Give all ranks that have the same of a tensor the values of the first."""
        for group, parameters in self._by_group(dict.fromkeys(self._named.values()), lambda p: p.held_along):
            self._share(parameters, group)
        self._share(self.trained.buffers, self.groups.over(*WITHIN_STAGE))
        self._sharing.sync_initial_state()

    def around_slice(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return self._sums.around_slice(last=last)

    def finish(self) -> None:
        self._sums.finish(self.waits)
        self._owner.take_gradients()
        with self.waits.waiting():
            for group, parameters in self._remaining:
                if group is not None:
                    sum_over(group, [p.grad for p in parameters if p.grad is not None])
            self._sharing.add_gradients()
            self._share(self.trained.buffers, self.batch)

    def total_weight(self, own: Weight, *, counts_samples: bool) -> Weight:
        if counts_samples:
            return self.context.train.global_batch_size
        return own if self.batch is None else weight_sum(own, device=self.context.device, group=self.batch)

    def mean_loss(self, loss_sum: Tensor, weight: Weight) -> Tensor:
        totals = torch.stack((loss_sum, on_device(weight, self.context.device).to(loss_sum.dtype)))
        if self.batch is not None:
            dist.all_reduce(totals, group=self.batch)
        return super().mean_loss(*totals)

    def norm(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor:
        mesh = self.context.mesh
        return norm_over(dist.group.WORLD, parameters, device, lambda p: self._placements[p].copies(mesh))

    def _shard_map(self) -> ShardMap:
        """Return how the tensors are divided over the ranks that have their shards. Collective."""
        mesh, rank = self.context.mesh, self.context.global_rank
        ranks = mesh.group(DIVIDING, rank)
        divided = {p: placement for p, placement in self._placements.items() if placement.cuts}
        boxes = {p: [box for r in ranks if (box := placed.box(mesh, r)) is not None] for p, placed in divided.items()}
        return ShardMap(boxes=boxes, index=ranks.index(rank), group=self.groups.over(*DIVIDING))

    def _by_group(
        self, parameters: Iterable[nn.Parameter], axes_of: Callable[[Placement], Axes]
    ) -> Sequence[tuple[dist.ProcessGroup | None, list[nn.Parameter]]]:
        by_axes: dict[Axes, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_axes.setdefault(axes_of(self._placements[parameter]), []).append(parameter)
        return [(self.groups.over(*axes), by_axes[axes]) for axes in sorted(by_axes)]

    def _share(self, tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
        if group is not None:
            broadcast_tensors(tensors, source=0, device=self.context.device, group=group)
