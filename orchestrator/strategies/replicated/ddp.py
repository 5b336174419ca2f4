"""``ddp``: ``DistributedDataParallel``, a replica of the model on every worker.

Each rank computes the loss of its share of the global batch. The gradients are averaged bucket by bucket, overlapped
with the last backward pass of the step. The loss of a rank is weighted by its part of the global weight, so that uneven
shares give the exact gradient. All ranks make the same update and then take the buffers of rank 0; rank 0 saves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from orchestrator.compat.modules import ddp_comm_ms, release_ddp, set_ddp_timing, without_buffer_broadcasts
from orchestrator.config.schema import Config
from orchestrator.planning.plan import Plan
from orchestrator.protocol.messages import RecoverableSteps
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.group_reduction import GroupReduction
from orchestrator.strategies.groups import MeshGroups
from orchestrator.strategies.kept_state import KeptState
from orchestrator.strategies.keys import ReplicatedConfig
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.reduction import Reduction
from orchestrator.strategies.replicated.comm_hooks import PowerSGD, average, average_in
from orchestrator.strategies.replicated.ddp_options import bucket_arguments, bucket_notes
from orchestrator.strategies.replicated.optimizer_shards import (
    OptimizerSharding,
    OptimizerShards,
    check_optimizer_shards,
    cuts_of,
)
from orchestrator.strategies.replicated.sync_batchnorm import SyncBatchNorm, synchronize
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.trainer import Trainer
from orchestrator.strategies.update.job_optimizer import sparse_parameters
from orchestrator.strategies.whole_model import WholeModel


class DDP(Trainer):
    """A replica of the model whose gradients are summed over all ranks."""

    compares_whole = True
    passes: WholeModel
    _buckets: InBackward | None = None  # while there is a process group
    _powersgd: PowerSGD | None = None
    _timed = False
    _norms: Sequence[SyncBatchNorm] = ()

    @classmethod
    def check_job(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        options, notes = ReplicatedConfig.of(config.strategy), super().check_job(config, outline, plan, errors)
        if options.shard_optimizer:
            notes = (*notes, *check_optimizer_shards(outline, plan, errors))
        return (*notes, *bucket_notes(options, outline.model, plan))

    def setup(self, train_set: Dataset[Any]) -> None:
        super().setup(train_set)
        options, model = ReplicatedConfig.of(self.context.options), self.passes.model
        if options.sync_batchnorm:
            self._norms = synchronize(model, self.context.device)
        if options.comm_hook == "powersgd":
            self._powersgd = PowerSGD(model, approximation_rank=options.powersgd_rank)

    def attach(self) -> None:
        super().attach()
        self._buckets = self.reduction = self.in_backward()

    def in_backward(self) -> InBackward:
        """Return the reduction. Collective."""
        return InBackward(self.passes, self.trained, self.context, self._powersgd)

    @property
    def compares_together(self) -> bool:
        return ReplicatedConfig.of(self.context.options).sync_batchnorm

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
        self._buckets = self.reduction = self.in_backward()

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


class InBackward(GroupReduction):
    """``DistributedDataParallel``: sums bucket by bucket, overlapped with the last backward pass of a step.

    Attributes:
        replica: the wrapped model; deleted by :meth:`close`.
    """

    def __init__(self, passes: WholeModel, trained: Trained, context: Context, powersgd: PowerSGD | None):
        """Wrap the model. Collective."""
        super().__init__(context, trained, MeshGroups(context))
        self._passes = passes
        self._parameters = [p for p in passes.model.parameters() if p.requires_grad]
        self._options = options = ReplicatedConfig.of(context.options)
        # DDP divides gradients by the number of ranks, and a sum is needed: the loss has its global weight already.
        self.averages_over = context.mesh.world_size
        # At this level, DDP's errors name the parameters concerned.
        dist.set_debug_level(dist.DebugLevel.INFO)
        self.replica = replica = DistributedDataParallel(
            passes.unwrapped,
            device_ids=None if context.device.type == "cpu" else [context.device],
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            gradient_as_bucket_view=True,
            init_sync=False,  # ranks may still be at different steps
            **bucket_arguments(self._parameters, options.bucket_mb, device=context.device.type),
            **without_buffer_broadcasts(),  # evaluation comes before the next forward pass
        )
        passes.forward_model = replica
        # Lambdas, because DDP compares a hook's annotations with types, and here annotations are strings.
        if options.comm_hook in ("bf16", "fp16"):
            dtype = torch.bfloat16 if options.comm_hook == "bf16" else torch.float16
            replica.register_comm_hook(dtype, lambda dtype, bucket: average_in(dtype, bucket))
        elif powersgd is not None:
            replica.register_comm_hook(powersgd, lambda powersgd, bucket: powersgd.average(bucket))
        elif sparse_parameters([passes.model]):
            replica.register_comm_hook(None, lambda _, bucket: average(bucket))

    @contextlib.contextmanager
    def around_slice(self, *, last: bool) -> Iterator[None]:
        """Sum the gradients in the backward pass of the last slice alone."""
        # The forward pass must be inside as well, because DDP decides there whether to synchronise.
        with contextlib.nullcontext() if last else self.replica.no_sync():
            try:
                yield
            except RuntimeError as e:
                # A parameter was used in an earlier slice of the previous step, but not in its last one.
                if "finished reduction in the prior iteration" not in str(e):
                    raise
                raise ValueError(f"set strategy.find_unused_parameters=true: {e}") from e

    def finish(self) -> None:
        if not self._options.find_unused_parameters and any(p.grad is None for p in self._parameters):
            named, own = self._passes.model.named_parameters(), {*self._parameters}
            unused = [n for n, p in named if p in own and p.grad is None]
            raise ValueError(
                f"parameters that take no part in the loss: {', '.join(unused)}; the other ranks would wait for "
                "their gradients. Use them, freeze them (requires_grad=False), or set "
                "strategy.find_unused_parameters=true"
            )
        self.share(self.trained.buffers)

    def close(self) -> None:
        """Release everything that references the process group.

        Its connections then close, which frees the ranks that wait for this one. If the reducer were the last owner of
        the group, its destructor would wait for gloo's threads while it holds the GIL, which they may be waiting for.
        """
        self._passes.forward_model = self._passes.unwrapped
        release_ddp(self.replica)
        del self.replica


class ShardedDDP(OptimizerSharding, DDP):
    """``strategy.shard_optimizer``: replicas of the model, of which each rank trains a part."""

    def trained_of(self, model: nn.Module, train_set: Dataset[Any]) -> Trained:
        return self.trained_part_of([model], model, cuts_of(model, self.context.mesh.num_shards), train_set)

    def undivided(self) -> nn.Module:
        return self.passes.model

    def in_backward(self) -> InBackward:
        return InBackwardShards(self.passes, self.trained, self.context, self.shards)

    @property
    def own_model(self) -> nn.Module | None:
        return self.passes.model

    @property
    def saved_names(self) -> Sequence[str]:
        return tuple(self.passes.model.state_dict())


class InBackwardShards(InBackward):
    """Sums in the backward pass, of which each rank then keeps its part."""

    def __init__(self, passes: WholeModel, trained: Trained, context: Context, shards: OptimizerShards):
        """Wrap the model. Collective."""
        super().__init__(passes, trained, context, None)
        self.settles = context.mesh.replicate > 1
        self._shards = shards
        shards.group = self.groups.over("shard")

    def finish(self) -> None:
        super().finish()
        self._shards.take_gradients()
