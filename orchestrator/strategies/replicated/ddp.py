"""``ddp``: ``DistributedDataParallel``, a replica of the model on every worker.

Each rank computes the loss of its share of the global batch. The gradients are averaged bucket by bucket, overlapped
with the last backward pass of the step. The loss of a rank is weighted by its part of the global weight, so that uneven
shares give the exact gradient. All ranks make the same update and then take the buffers of rank 0; rank 0 saves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.compat.modules import ddp_comm_ms, set_ddp_timing
from orchestrator.config.schema import Config
from orchestrator.planning.mesh import DENSE
from orchestrator.planning.plan import Plan
from orchestrator.protocol.messages import RecoverableSteps
from orchestrator.protocol.metrics import MetricSpec
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.groups import MeshGroups
from orchestrator.strategies.kept_state import KeptState
from orchestrator.strategies.keys import ReplicatedConfig
from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.owner import Own, cuts_of
from orchestrator.strategies.part_trainer import PartTrainer
from orchestrator.strategies.reduction import Reduction
from orchestrator.strategies.replicated.comm_hooks import PowerSGD
from orchestrator.strategies.replicated.ddp_options import bucket_notes
from orchestrator.strategies.replicated.optimizer_shards import check_optimizer_shards
from orchestrator.strategies.replicated.sync_batchnorm import SyncBatchNorm, synchronize
from orchestrator.strategies.sums.buckets import Buckets
from orchestrator.strategies.sums.mesh_reduction import MeshReduction
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.trainer import Trainer
from orchestrator.strategies.whole_model import WholeModel


class DDP(Trainer):
    """A replica of the model whose gradients are summed over all ranks."""

    compares_whole = True
    passes: WholeModel
    _buckets: Buckets | None = None  # while there is a process group
    _powersgd: PowerSGD | None = None
    _timed = False
    _norms: Sequence[SyncBatchNorm] = ()

    @classmethod
    def check_job(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        options, notes = ReplicatedConfig.of(config.strategy), super().check_job(config, outline, plan, errors)
        if options.shard_optimizer:
            notes = (*notes, *check_optimizer_shards(outline, plan, errors))
        return (*notes, *bucket_notes(options, outline.model, plan))

    owner: Own

    def trained_of(self, model: nn.Module, train_set: Dataset[Any]) -> Trained:
        trained = super().trained_of(model, train_set)
        self.owner = Own(trained.module, trained.placements)
        return trained

    def setup(self, train_set: Dataset[Any]) -> None:
        super().setup(train_set)
        options, model = ReplicatedConfig.of(self.context.options), self.passes.model
        if options.sync_batchnorm:
            self._norms = synchronize(model, self.context.device)
        if options.comm_hook == "powersgd":
            self._powersgd = PowerSGD(model, approximation_rank=options.powersgd_rank)

    def attach(self) -> None:
        super().attach()
        self._begin_sums()

    def _begin_sums(self) -> None:
        """Wrap the model. Collective."""
        groups = MeshGroups(self.context)
        self._buckets = Buckets(self.passes, self.context, self._powersgd)
        self.owner.group = groups.over(*DENSE)
        self.reduction = MeshReduction(self.context, self.trained, groups, self._buckets, owner=self.owner)

    @property
    def compares_training(self) -> bool:
        return not ReplicatedConfig.of(self.context.options).sync_batchnorm  # of which each worker has all statistics

    @property
    def compared_slices(self) -> tuple[int, int, int]:
        slices, rows, parts = super().compared_slices
        return (1 if ReplicatedConfig.of(self.context.options).static_graph else slices), rows, parts

    @contextlib.contextmanager
    def comparing(self) -> Iterator[Callable[[], None]]:
        kept = KeptState((), (), others=[*filter(None, [self._powersgd])])
        try:
            if self._powersgd is not None:
                self._powersgd.load_state({}, steps=0)  # whose first steps sum whole gradients
            with super().comparing() as restore:
                yield restore
        finally:
            kept.restore()

    @property
    def remedy(self) -> str:
        if ReplicatedConfig.of(self.context.options).find_unused_parameters:
            return super().remedy
        return (
            "If samples use different parameters, set strategy.find_unused_parameters=true; otherwise use "
            "strategy=single"
        )

    @property
    def compared_dtypes(self) -> Sequence[torch.dtype]:
        hook = ReplicatedConfig.of(self.context.options).comm_hook
        in_hook = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(hook)
        return [*super().compared_dtypes, *filter(None, [in_hook])]

    def renew_sums(self) -> None:
        assert self._buckets is not None
        self._buckets.close()
        self._begin_sums()

    def around_step(self, *, logged: bool) -> contextlib.AbstractContextManager[None]:
        assert self._buckets is not None
        # DDP synchronises with the device to read its timers, so they are sampled only in steps that are logged.
        self._timed = logged
        set_ddp_timing(self._buckets.replica, enabled=logged)
        for norm in self._norms:
            norm.waited_s = 0.0
        return super().around_step(logged=logged)

    def end_step(self, norm: Tensor | None) -> bool:
        admitted = super().end_step(norm)
        if not admitted and self._powersgd is not None:
            self._powersgd.forget()
        return admitted

    def capture(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState | None:
        # The errors of PowerSGD are the one state that differs by rank; their mean is saved. Collective.
        tensors = {} if self._powersgd is None else self._powersgd.state()
        state = super().capture(step=step, samples_consumed=samples_consumed, into=into)
        if state is not None:
            # No parameter has these names, so other strategies ignore the tensors.
            state.optimizer.update({name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()})
        return state

    def load(self, state: TrainState, *, partial: bool = False, consume: bool = True) -> None:
        if self._powersgd is not None:
            self._powersgd.load_state(state.optimizer, steps=state.step)
        super().load(state, partial=partial, consume=consume)

    def recoverable_steps(self, step: int) -> RecoverableSteps:
        return {} if self._powersgd is not None else super().recoverable_steps(step)

    def comm_ms(self) -> float | None:
        assert self._buckets is not None
        gradients_ms = ddp_comm_ms(self._buckets.replica) if self._timed else None
        return None if gradients_ms is None else gradients_ms + 1e3 * sum(norm.waited_s for norm in self._norms)

    def close(self) -> None:
        if self._buckets is not None:
            self._buckets.close()
            self._buckets, self.reduction = None, Reduction()
        super().close()


class ShardedDDP(PartTrainer, DDP):
    """``strategy.shard_optimizer``: replicas of the model, of which each rank trains a part."""

    def trained_of(self, model: nn.Module, train_set: Dataset[Any]) -> Trained:
        owner = self.shards_of(cuts_of(model, self.context.mesh.num_shards))
        return self.trained_part([model], owner, train_set, whole=model)

    def undivided(self) -> nn.Module:
        return self.passes.model

    @property
    def timers(self) -> Mapping[MetricSpec, WaitTimer]:
        return {}  # DDP measures its buckets itself

    @property
    def own_model(self) -> nn.Module | None:
        return self.passes.model

    @property
    def saved_names(self) -> Sequence[str]:
        return tuple(self.passes.model.state_dict())
