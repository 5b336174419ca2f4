"""The gradients of a rank's stages: summed over the ranks that have the same stages, and over shared parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.state.transport import broadcast_tensors
from orchestrator.strategies.base import Context
from orchestrator.strategies.measure.device_clock import WaitTimer
from orchestrator.strategies.pipelined.replica_sums import StageSums
from orchestrator.strategies.pipelined.shared_tensors import Sharing
from orchestrator.strategies.reduction import Reduction, Weight, weight_sum
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.update.gradients import norm_over


@dataclass(frozen=True, kw_only=True)
class StageGradients(Reduction):
    """The reduction of one rank, in the process groups of one generation.

    Attributes:
        context: of this rank.
        trained: its stages.
        peers: the ranks that compute the same stages, of other samples; None if there are no others.
        whole: the parameters that all peers have whole. Of the others, each has a part.
        sums: those over the peers, which may begin in the backward passes.
        sharing: the tensors that belong to stages on several ranks.
        waits: for the peers.
        settles: as there are replicas, which provide the state of a lost rank.
    """

    context: Context
    trained: Trained
    peers: dist.ProcessGroup | None
    whole: Collection[Tensor]
    sums: StageSums
    sharing: Sharing
    waits: WaitTimer
    settles: bool

    @torch.no_grad()
    def sync_initial_state(self) -> None:
        """Give all peers the values of the first, and all stages one value of each shared parameter."""
        self._share([*self.whole, *self.trained.buffers])
        self.sharing.sync_initial_state()

    def total_weight(self, own: Weight, *, counts_samples: bool) -> Weight:
        if counts_samples:
            return self.context.train.global_batch_size
        return own if self.peers is None else weight_sum(own, device=self.context.device, group=self.peers)

    def finish(self) -> None:
        self.sums.finish(self.waits)
        with self.waits.waiting():
            self.sharing.add_gradients()
        self._share(self.trained.buffers)

    def norm(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor:
        whole, peers = {*self.whole}, 1 if self.peers is None else self.peers.size()
        copies = self.sharing.copies
        return norm_over(
            dist.group.WORLD, parameters, device, lambda p: (peers if p in whole else 1) * copies.get(p, 1)
        )

    def waited_ms(self) -> float | None:
        """Return how long the last step waited for its peers, in ms; None if there are none."""
        return None if self.peers is None else self.waits.total_ms()

    def _share(self, tensors: Sequence[Tensor]) -> None:
        """Give all peers the values of the first."""
        if self.peers is not None:
            broadcast_tensors(tensors, source=0, device=self.context.device, group=self.peers)
