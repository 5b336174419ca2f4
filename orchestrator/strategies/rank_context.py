"""The place of a rank in the run, as every part of a strategy is given it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from orchestrator.config.schema import StrategyConfig, TrainConfig
from orchestrator.planning.mesh import TOGETHER, Mesh
from orchestrator.planning.schedules import PipelineLayout


@dataclass(frozen=True, kw_only=True)
class Context:
    """The place of a rank in the run.

    Attributes:
        device: where model and batches are; the first device if this rank drives several.
        seed: ``seed`` of the configuration, equal on all ranks.
        train: the ``train`` section of the configuration.
        options: the ``strategy`` section of the configuration.
        collective_timeout_s: the limit of an operation between ranks.
        pipeline: the stages and micro-batches; None if the model is not cut.
        num_devices: the number of devices that this rank drives.
        peer_copy_every: steps between copies of this rank's state to a neighbour's memory; 0 for no copies.
        only_trained: whether what is saved leaves out the parameters that no optimizer updates.
    """

    mesh: Mesh
    global_rank: int
    device: torch.device
    seed: int
    train: TrainConfig
    options: StrategyConfig
    collective_timeout_s: float
    pipeline: PipelineLayout | None = None
    num_devices: int = 1
    peer_copy_every: int = 0
    only_trained: bool = False

    @property
    def dp_rank(self) -> int:
        """The index of the replica that this rank belongs to."""
        return self.mesh.dp_rank(self.global_rank)

    @property
    def counts_samples(self) -> bool:
        """Whether this rank reports its samples, as the first of the ranks that compute them together."""
        return self.mesh.place(TOGETHER, self.global_rank)[0] == 0

    @property
    def pp_rank(self) -> int:
        """The position of this rank in its pipeline."""
        return self.mesh.coords(self.global_rank).pipeline
