"""Workers that compute blocks, or samples, together, in groups, and replicas of these groups.

The gradients of replicas are summed after the last backward pass of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.config.schema import Config
from orchestrator.model.partial_init import build_divided
from orchestrator.model.tensor_slots import move, tensor_slots
from orchestrator.planning.mesh import DENSE, TOKENS
from orchestrator.planning.plan import Plan
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.batch_parts import BatchDivision
from orchestrator.strategies.groups import MeshGroups
from orchestrator.strategies.owner import Own, cuts_of
from orchestrator.strategies.part_trainer import PartTrainer
from orchestrator.strategies.reduction import Reduction
from orchestrator.strategies.replicated.optimizer_shards import check_optimizer_shards
from orchestrator.strategies.sharded.shard_options import part_errors
from orchestrator.strategies.sums.mesh_reduction import MeshReduction
from orchestrator.strategies.sums.sums import Sums
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.transforms.every import check_parts
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
        notes = (*notes, *check_parts(config, outline, plan, errors))
        if getattr(config.strategy, "shard_optimizer", False):
            outline = cls.outline_of_worker(config, outline, plan)
            notes = (*notes, *check_optimizer_shards(outline, plan, errors))
        return notes

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
        if self.divides_optimizer:
            owner: Own = self.shards_of(cuts_of(model, self.context.mesh.num_shards))
        else:
            named = model.named_parameters(remove_duplicate=False)
            owner = Own(self.undivided, {name: self.placement(name, tuple(p.shape)) for name, p in named})
        return self.trained_part([model], owner, train_set)

    def undivided(self) -> nn.Module:
        return self.passes.model

    def attach(self) -> None:
        super().attach()
        groups = MeshGroups(self.context)
        self.parts.connect(groups.over, self.context.device)
        self.owner.group = groups.over(*DENSE) if self.divides_optimizer else None
        whole = [parameter for parameter in self.undivided().parameters() if parameter.requires_grad]
        sums = Sums(whole, groups.over(*TOKENS), self.context.device, of_whole=self.divides_optimizer)
        self.reduction = MeshReduction(self.context, self.trained, groups, sums, owner=self.owner)

    @property
    def saved_names(self) -> Sequence[str]:
        return tuple(self.passes.model.state_dict())

    def close(self) -> None:
        self.reduction = Reduction()
        super().close()
