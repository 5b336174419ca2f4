"""The gradients of a rank's stages: summed over the replicas of each, and over the stages that share a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.state.transport import broadcast_tensors
from orchestrator.strategies.base import Context
from orchestrator.strategies.measure.device_clock import WaitTimer
from orchestrator.strategies.pipelined.replica_sums import ReplicaSums
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
        replicas: the ranks that have the same stages; None if there is one replica.
        sums: those over the replicas, which begin in the backward passes.
        sharing: the tensors that belong to stages on several ranks.
        waits: for the other replicas.
        settles: as there are replicas, which provide the state of a lost rank.
    """

    context: Context
    trained: Trained
    replicas: dist.ProcessGroup | None
    sums: ReplicaSums
    sharing: Sharing
    waits: WaitTimer
    settles: bool

    @torch.no_grad()
    def sync_initial_state(self) -> None:
        """Give all replicas the values of the first, and all stages one value of each shared parameter."""
        self._share([*self.trained.module().parameters(), *self.trained.buffers])
        self.sharing.sync_initial_state()

    def total_weight(self, own: Weight, *, counts_samples: bool) -> Weight:
        if counts_samples:
            return self.context.train.global_batch_size
        return own if self.replicas is None else weight_sum(own, device=self.context.device, group=self.replicas)

    def finish(self) -> None:
        self.waits.restart()
        self.sums.finish(self.waits)
        with self.waits.waiting():
            self.sharing.add_gradients()
        self._share(self.trained.buffers)

    def norm(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor:
        replicas = self.context.mesh.replicate
        return norm_over(dist.group.WORLD, parameters, device, lambda p: replicas * self.sharing.copies.get(p, 1))

    def waited_ms(self) -> float | None:
        """Return how long the last step waited for the other replicas, in ms; None if there are none."""
        return None if self.replicas is None else self.waits.total_ms()

    def _share(self, tensors: Sequence[Tensor]) -> None:
        """Give all replicas the values of the first."""
        if self.replicas is not None:
            broadcast_tensors(tensors, source=0, device=self.context.device, group=self.replicas)
