"""``ddp``: ``DistributedDataParallel``, a replica of the model on every worker.

Each rank computes the loss of its share of the global batch. The gradients are averaged bucket by bucket, overlapped
with the last backward pass of the step. The loss of a rank is weighted by its part of the global weight, so that uneven
shares give the exact gradient. All ranks make the same update and then take the buffers of rank 0; rank 0 saves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from orchestrator.compat.torch import (
    ddp_comm_ms,
    release_ddp,
    set_ddp_timing,
    without_buffer_broadcasts,
)
from orchestrator.config.schema import Config, StrategyConfig, TrainConfig, option
from orchestrator.job import Job, has_training_step
from orchestrator.model.meta import on_meta_device
from orchestrator.model.precision import Precision
from orchestrator.planning.plan import Plan
from orchestrator.protocol.messages import RecoverableSteps
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import broadcast_tensors
from orchestrator.strategies.base import Context, Strategy
from orchestrator.strategies.reduction import Reduction, Weight, weight_sum
from orchestrator.strategies.registry import register
from orchestrator.strategies.replicated.buckets import SMALLEST_MB, bucket_arguments, bucket_mb_for
from orchestrator.strategies.replicated.comm_hooks import PowerSGD, average, average_in
from orchestrator.strategies.replicated.job_step import JobStep
from orchestrator.strategies.replicated.sync_batchnorm import SyncBatchNorm, check_batchnorm, synchronize
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.trainer import Trainer
from orchestrator.strategies.update.diverging import diverging_errors
from orchestrator.strategies.update.fused_updates import sparse_parameters
from orchestrator.strategies.update.gradients import norm_over
from orchestrator.strategies.whole_model import WholeModel

SMALLEST_COMPILED_BUCKET_MB = 1.0
"""The size of the first bucket of ``DistributedDataParallel``, in MiB."""


@dataclass(frozen=True, kw_only=True)
class DDPConfig(StrategyConfig):
    """The keys of ``ddp``."""

    elastic = True

    name: Literal["ddp"]
    bucket_mb: float | Literal["auto"] = option(
        "size of the gradient buckets, in MiB; auto: 25 on CPUs, on GPUs an eighth of the gradients, from 25 to 200",
        above=0,
    )
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = option("compression of the gradients that are exchanged")
    powersgd_rank: int = option("rank of the approximation with comm_hook=powersgd", minimum=1)
    find_unused_parameters: bool = option("allow parameters that do not contribute to the loss of every step")
    static_graph: bool = option("every step uses the same parameters in the same order, which DDP then does not check")
    sync_batchnorm: bool = option("BatchNorm uses the statistics of all workers' samples, not of each worker's own")


@register("ddp")
class DDP(Trainer):
    """A replica of the model whose gradients are summed over all ranks."""

    config_class: ClassVar[type[StrategyConfig]] = DDPConfig
    runs_training_step = True
    passes: WholeModel
    _buckets: InBackward | None = None
    """The reduction, while there is a process group."""
    _powersgd: PowerSGD | None = None
    _timed = False
    _norms: Sequence[SyncBatchNorm] = ()

    @classmethod
    def check_job(cls, config: Config, job: Job, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        options = config.strategy
        assert isinstance(options, DDPConfig)
        if has_training_step(job):
            errors += _unsupported(options, plan)
        if options.comm_hook == "powersgd" and config.train.precision == "fp16":
            errors.append(
                "strategy.comm_hook=powersgd: it carries errors of gradients to the next step, which has another scale "
                "of the loss with train.precision=fp16; set that to bf16 or fp32"
            )
        if options.static_graph:
            errors += _not_static(options, config.train)
        too_small = options.bucket_mb != "auto" and options.bucket_mb < SMALLEST_COMPILED_BUCKET_MB
        if config.train.compile is not False and too_small:
            errors.append(
                f"strategy.bucket_mb={options.bucket_mb:g}: torch.compile cuts the backward pass at the buckets, which "
                f"have to be larger than the first one; set it to {SMALLEST_COMPILED_BUCKET_MB:g} or more"
            )
        errors += diverging_errors(job, plan)
        notes = check_batchnorm(job, plan, synchronized=options.sync_batchnorm, errors=errors)
        return (*notes, *_bucket_notes(options, config.train, job, plan))

    @classmethod
    def create(cls, context: Context, job: Job) -> Strategy:
        """Return ``JobStep`` for a job that makes its own updates, else ``DDP``."""
        if has_training_step(job):
            return JobStep(context, job, sync_batchnorm=_options(context).sync_batchnorm)
        return cls(context, job)

    def setup(self, train_set: Dataset[Any]) -> None:
        super().setup(train_set)
        options, model = _options(self.context), self.passes.model
        if options.sync_batchnorm:
            self._norms = synchronize(model, self.context.device)
        if options.comm_hook == "powersgd":
            self._powersgd = PowerSGD(model, approximation_rank=options.powersgd_rank)

    def attach(self) -> None:
        super().attach()
        self._buckets = self.reduction = InBackward(self.passes, self.trained, self.context, self._powersgd)

    def sync_initial_state(self) -> None:
        tensors = (*self.passes.model.parameters(), *self.trained.buffers)
        broadcast_tensors(tensors, source=0, device=self.context.device)

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
            self._buckets = None


class InBackward(Reduction):
    """``DistributedDataParallel``: sums bucket by bucket, overlapped with the last backward pass of a step.

    Attributes:
        replica: the wrapped model; deleted by :meth:`close`.
    """

    def __init__(self, passes: WholeModel, trained: Trained, context: Context, powersgd: PowerSGD | None):
        """Wrap the model. Collective."""
        self._passes = passes
        self._trained = trained
        self._device = context.device
        self._samples = context.train.global_batch_size
        self._options = options = _options(context)
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
            **bucket_arguments(trained.parameters, options.bucket_mb, device=context.device.type),
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

    def total_weight(self, own: Weight, *, counts_samples: bool) -> Weight:
        return self._samples if counts_samples else weight_sum(own, device=self._device)

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
        if not self._options.find_unused_parameters and any(p.grad is None for p in self._trained.parameters):
            named = self._passes.model.named_parameters()
            unused = [n for n, p in named if p.requires_grad and p.grad is None]
            raise ValueError(
                f"parameters that take no part in the loss: {', '.join(unused)}; the other ranks would wait for "
                "their gradients. Use them, freeze them (requires_grad=False), or set "
                "strategy.find_unused_parameters=true"
            )
        broadcast_tensors(self._trained.buffers, source=0, device=self._device)

    def norm(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor:
        return norm_over(dist.group.WORLD, parameters, device, lambda parameter: self.averages_over)

    def close(self) -> None:
        """Release everything that references the process group.

        Its connections then close, which frees the ranks that wait for this one. If the reducer were the last owner of
        the group, its destructor would wait for gloo's threads while it holds the GIL, which they may be waiting for.
        """
        self._passes.forward_model = self._passes.unwrapped
        release_ddp(self.replica)
        del self.replica


def _options(context: Context) -> DDPConfig:
    assert isinstance(context.options, DDPConfig)
    return context.options


def _bucket_notes(options: DDPConfig, train: TrainConfig, job: Job, plan: Plan) -> tuple[str, ...]:
    """Return a note if ``strategy.bucket_mb=auto`` chooses other buckets than torch does."""
    if options.bucket_mb != "auto" or plan.device == "cpu" or has_training_step(job):
        return ()
    model = on_meta_device(Precision.named(train.precision, plan.device).converted(job.model))
    chosen_mb = SMALLEST_MB if model is None else bucket_mb_for(model.parameters(), "auto", device=plan.device)
    return () if chosen_mb == SMALLEST_MB else (f"strategy.bucket_mb=auto: gradient buckets of {chosen_mb:g} MiB",)


def _not_static(options: DDPConfig, train: TrainConfig) -> list[str]:
    """Return why the steps do not have one graph, as ``strategy.static_graph=true`` says."""
    key, errors = "strategy.static_graph=true", []
    if train.grad_accumulation > 1:
        errors.append(
            f"{key}: DDP learns the graph from the first backward pass, which exchanges no gradients with "
            f"train.grad_accumulation={train.grad_accumulation}; set that to 1, or static_graph to false"
        )
    if train.compile is not False:
        errors.append(f"{key}: code that is compiled again has another graph; set it to false, or train.compile=false")
    if options.find_unused_parameters:
        errors.append(f"{key}: every step uses the same parameters then; set strategy.find_unused_parameters=false")
    return errors


def _unsupported(options: DDPConfig, plan: Plan) -> list[str]:
    """Return an error for each option that cannot be combined with ``Job.training_step``."""
    errors = []
    if options.comm_hook != "none":
        errors.append(
            f"strategy.comm_hook={options.comm_hook}: the job overrides Job.training_step, whose gradients are not "
            "compressed; set it to none"
        )
    shares = {worker.samples_per_step for worker in plan.workers}
    if options.sync_batchnorm and len(shares) > 1:
        errors.append(
            f"train.global_batch_size={plan.global_batch_size}: with Job.training_step, strategy.sync_batchnorm=true "
            f"needs equal shares of the batch; set it to a multiple of {len(plan.workers)}"
        )
    return errors
