"""The whole model on each rank, or its part of each block and sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.model.partial_init import build_divided
from orchestrator.model.tensor_slots import move, tensor_slots
from orchestrator.planning.mesh import DENSE, TOKENS
from orchestrator.strategies.constructor import constructor_of
from orchestrator.strategies.groups import MeshGroups
from orchestrator.strategies.keys import MeshConfig
from orchestrator.strategies.owner import Own, Shards
from orchestrator.strategies.parts.part import ModelPart
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.replicated.comm_hooks import PowerSGD
from orchestrator.strategies.replicated.sync_batchnorm import SyncBatchNorm, synchronize
from orchestrator.strategies.sums.buckets import Buckets
from orchestrator.strategies.sums.sums import Sums
from orchestrator.strategies.transforms.part import Parts
from orchestrator.strategies.update.job_optimizer import optimizer_of, optimizer_of_part
from orchestrator.strategies.whole_model import WholeModel


class Whole(ModelPart):
    """A model that nothing is gathered of."""

    passes: WholeModel
    _norms: Sequence[SyncBatchNorm] = ()

    def setup(self, context: Context, parts: Parts, train_set: Any) -> None:
        super().setup(context, parts, train_set)
        model = self._divided(context) if parts.each else None
        self.passes = WholeModel(self.job_of_part, context, self.precision, model=model)

    def _divided(self, context: Context) -> nn.Module:
        """Return this rank's part."""
        model, parameters = build_divided(
            self.parts.of(constructor_of(self.job, context.train, self.precision)),
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
        return model

    def complete(self, context: Context, train_set: Any) -> None:
        self.passes.compile(context.train)  # after the comparison of a batch, for one shape of it

    def prepare_sums(self, context: Context) -> None:
        if self.parts.each:
            return
        options = MeshConfig.of(context.options)
        if options.sync_batchnorm:
            self._norms = synchronize(self.module(), context.device)
        if options.comm_hook == "powersgd":
            self.powersgd = PowerSGD(self.module(), approximation_rank=options.powersgd_rank)

    def module(self) -> nn.Module:
        return self.passes.model

    @property
    def outline(self) -> nn.Module:
        return self.passes.model

    @property
    def saved_names(self) -> Sequence[str]:
        return tuple(self.passes.model.state_dict())

    def optimizer(self, owner: Own) -> Optimizer:
        if not self.parts.each and not isinstance(owner, Shards):
            return optimizer_of(self.job, self.module())
        whole = self.whole_model() if self.parts.each else self.module()
        return optimizer_of_part(self.job, whole, owner.module())

    def sums(self, context: Context, groups: MeshGroups, owner: Own) -> Sums:
        divides = isinstance(owner, Shards)
        owner.group = groups.over(*DENSE) if divides else None
        if not self.parts.each:
            return Buckets(self.passes, context, self.powersgd, self._norms)
        trained = [parameter for parameter in self.module().parameters() if parameter.requires_grad]
        return Sums(trained, groups.over(*TOKENS), context.device, of_whole=divides)
