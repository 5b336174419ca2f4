"""Stages whose optimizer state is divided: each worker of a stage has it whole, and trains a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from orchestrator.config.schema import Config
from orchestrator.planning.mesh import DENSE, TOKENS
from orchestrator.planning.plan import Plan
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.group_reduction import Sums
from orchestrator.strategies.groups import MeshGroups
from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.pipelined.pipeline import Pipeline
from orchestrator.strategies.pipelined.replica_sums import ReplicaSums
from orchestrator.strategies.replicated.optimizer_shards import (
    OptimizerSharding,
    OptimizerShards,
    check_optimizer_shards,
    cuts_of,
)
from orchestrator.strategies.trained import Trained


class ShardedOptimizerPipeline(OptimizerSharding, Pipeline):
    """A stage of one of the replicas of a pipeline, or several, of which this rank trains a part."""

    @classmethod
    def check_job(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        before = len(errors)
        notes = super().check_job(config, outline, plan, errors)
        if len(errors) == before:
            check_optimizer_shards(outline, plan, errors)  # its note is on whole models
        return notes

    def trained_of_stages(self, outline: nn.Module, modules: Sequence[nn.Module], train_set: Dataset[Any]) -> Trained:
        # Divided as in the outline, so that stages that share a tensor have the same part of it on each rank.
        cuts = cuts_of(outline, self.context.mesh.num_shards)
        return self.trained_part_of(modules, self.whole_model(), cuts, train_set)

    def _sums(self, groups: MeshGroups) -> Sums:
        self.shards.group = groups.over(*DENSE)
        sums = _SumsOfShards(groups.over(*TOKENS), *self.summed())
        sums.shards = self.shards
        return sums


class _SumsOfShards(ReplicaSums):
    """Sums of whole gradients, of which each rank then keeps its ``shards``."""

    shards: OptimizerShards

    def finish(self, waits: WaitTimer) -> None:
        super().finish(waits)
        self.shards.take_gradients()
