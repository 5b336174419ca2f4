"""Workers that compute blocks, or samples, together, in groups, and replicas of these groups.

The gradients of replicas are summed after the last backward pass of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.config.schema import Config
from orchestrator.model.partial_init import build_divided
from orchestrator.model.tensor_slots import move, tensor_slots
from orchestrator.planning.mesh import DENSE, TOKENS
from orchestrator.planning.plan import Plan
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.batch_parts import BatchDivision
from orchestrator.strategies.group_reduction import PartReduction, Sums
from orchestrator.strategies.groups import MeshGroups
from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.part_trainer import PartTrainer
from orchestrator.strategies.reduction import Reduction
from orchestrator.strategies.replicated.optimizer_shards import (
    OptimizerSharding,
    OptimizerShards,
    check_optimizer_shards,
    cuts_of,
)
from orchestrator.strategies.sharded.shard_options import part_errors
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.transforms.every import check_parts
from orchestrator.strategies.update.gradients import found_anywhere, sum_over
from orchestrator.strategies.update.job_optimizer import optimizer_of_part
from orchestrator.strategies.whole_model import WholeModel


class TensorParallel(PartTrainer):
    """A part of each block or sample on every worker of a group, and replicas of the groups if the mesh has them."""

    divides_model = True
    moves_parameters = True
    passes: WholeModel

    @classmethod
    def check_job(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        notes = super().check_job(config, outline, plan, errors)
        errors += part_errors(config, outline)
        return (*notes, *check_parts(config, outline, plan, errors))

    def build(self, train_set: Dataset[Any]) -> nn.Module:
        """Build this rank's part, with the initial values that the whole model would have."""
        context = self.context
        self.find_parts(train_set)
        model, parameters = build_divided(
            self.constructor(),
            lambda shape: (),
            seed=context.seed,
            device=context.device,
            draws_as=0 if context.train.init == "fast" else None,
        )
        own: dict[int, Tensor] = {id(fake): parameters[name] for name, fake in model.named_parameters()}
        slots = list(tensor_slots(model))
        move([slot for slot in slots if id(slot.tensor) not in own], context.device)
        for slot in slots:
            if id(slot.tensor) in own:
                slot.fill(own)
        self.passes = WholeModel(self.job_of_part, context, self.precision, model=model)
        self.check_hooks(model)
        self._warnings = self.notes_on(model, train_set)
        self.passes.compile(context.train)
        return model

    def warning_about(self, division: BatchDivision, model: nn.Module, train_set: Dataset[Any]) -> str | None:
        return self.warning_of_whole(division, model, train_set)

    def trained_of(self, model: nn.Module, train_set: Dataset[Any]) -> Trained:
        named = model.named_parameters(remove_duplicate=False)
        return Trained(
            self.job,
            self.context,
            [model],
            {"": optimizer_of_part(self.job, self.whole_model(), model)},
            train_set,
            placements={name: self.placement(name, tuple(p.shape)) for name, p in named},
        )

    def undivided(self) -> nn.Module:
        return self.passes.model

    def attach(self) -> None:
        super().attach()
        groups = MeshGroups(self.context)
        self.parts.connect(groups.over, self.context.device)
        self.reduction = PartReduction(self.context, self.trained, groups, self.sums(groups), self._sharing)

    def sums(self, groups: MeshGroups) -> Sums:
        """Return what precedes the sums of gradients."""
        return SumsAtEnd(self.trained.parameters, groups.over(*TOKENS), self.context.device)

    @property
    def saved_names(self) -> Sequence[str]:
        return tuple(self.passes.model.state_dict())

    def close(self) -> None:
        self.reduction = Reduction()
        super().close()


class SumsAtEnd(Sums):
    """All sums are made after the backward passes. What one rank has a gradient of gets one on all of them."""

    def __init__(self, parameters: Sequence[nn.Parameter], batch: dist.ProcessGroup | None, device: torch.device):
        """Prepare for the sums of ``parameters`` over the ranks of ``batch``."""
        self.remaining = parameters
        self._parameters = parameters
        self._batch = batch
        self._device = device

    def finish(self, waits: WaitTimer) -> None:
        if self._batch is None:
            return
        with waits.waiting():
            found = found_anywhere(self._batch, [p.grad is not None for p in self._parameters], self._device)
        for parameter, exists in zip(self._parameters, found, strict=True):
            if exists and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class ShardedTensorParallel(OptimizerSharding, TensorParallel):
    """``strategy.shard_optimizer``: each of the workers that have the same trains a part of it."""

    @classmethod
    def check_job(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        notes = super().check_job(config, outline, plan, errors)
        return (*notes, *check_optimizer_shards(cls.outline_of_worker(config, outline, plan), plan, errors))

    def trained_of(self, model: nn.Module, train_set: Dataset[Any]) -> Trained:
        cuts = cuts_of(model, self.context.mesh.num_shards)
        return self.trained_part_of([model], self.whole_model(), cuts, train_set)

    def sums(self, groups: MeshGroups) -> Sums:
        self.shards.group = groups.over(*DENSE)
        whole = [parameter for parameter in self.undivided().parameters() if parameter.requires_grad]
        return _SumsOfShards(whole, groups.over(*TOKENS), self.context.device, self.shards)


class _SumsOfShards(SumsAtEnd):
    """Sums of whole gradients, of which each rank then keeps its shards."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        batch: dist.ProcessGroup | None,
        device: torch.device,
        shards: OptimizerShards,
    ):
        """Prepare for the sums, of which a rank keeps its ``shards``."""
        super().__init__(parameters, batch, device)
        self.remaining = ()
        self._shards = shards

    def finish(self, waits: WaitTimer) -> None:
        super().finish(waits)
        if self._batch is not None:
            with waits.waiting():
                sum_over(self._batch, [p.grad for p in self._parameters if p.grad is not None])
        self._shards.take_gradients()
