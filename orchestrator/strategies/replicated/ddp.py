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
from orchestrator.protocol.messages import ANY_RANK, RecoverableSteps
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import broadcast_state, broadcast_tensors
from orchestrator.strategies.base import Context, StepResult, Strategy
from orchestrator.strategies.diverging import diverging_errors
from orchestrator.strategies.fused_updates import sparse_parameters
from orchestrator.strategies.gradients import on_device
from orchestrator.strategies.registry import register
from orchestrator.strategies.replicated.buckets import SMALLEST_MB, bucket_arguments, bucket_mb_for
from orchestrator.strategies.replicated.comm_hooks import PowerSGD, average, average_in
from orchestrator.strategies.replicated.job_step import JobStep
from orchestrator.strategies.replicated.sync_batchnorm import SyncBatchNorm, check_batchnorm, synchronize
from orchestrator.strategies.replicated.whole_model import WholeModel, forward_module

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
class DDP(WholeModel):
    """A replica of the model whose gradients are averaged over all ranks."""

    config_class: ClassVar[type[StrategyConfig]] = DDPConfig
    runs_training_step = True
    replica: DistributedDataParallel | None = None
    """The wrapped model, while there is a process group."""

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
        options = context.options
        assert isinstance(options, DDPConfig)
        if has_training_step(job):
            return JobStep(context, job, sync_batchnorm=options.sync_batchnorm)
        return cls(context, job)

    def setup(self, train_set: Dataset[Any]) -> None:
        super().setup(train_set)
        options = self.context.options
        assert isinstance(options, DDPConfig)
        self._options = options
        self._step = 0
        self._timed = False
        self._norms: tuple[SyncBatchNorm, ...] = ()
        if options.sync_batchnorm:
            self._norms = synchronize(self.model, self.context.device)
        self._powersgd: PowerSGD | None = None
        if options.comm_hook == "powersgd":
            self._powersgd = PowerSGD(self.model, approximation_rank=options.powersgd_rank)

    def attach(self) -> None:
        super().attach()
        options = self._options
        # At this level, DDP's errors name the parameters concerned.
        dist.set_debug_level(dist.DebugLevel.INFO)
        replica = DistributedDataParallel(
            forward_module(self.job, self.model),
            device_ids=None if self.context.device.type == "cpu" else [self.context.device],
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            gradient_as_bucket_view=True,
            init_sync=False,  # ranks may still be at different steps
            **bucket_arguments(self.parameters, options.bucket_mb, device=self.context.device.type),
            **without_buffer_broadcasts(),  # evaluation comes before the next forward pass
        )
        self.replica = self.forward_model = replica
        # Lambdas, because DDP compares a hook's annotations with types, and here annotations are strings.
        if options.comm_hook in ("bf16", "fp16"):
            dtype = torch.bfloat16 if options.comm_hook == "bf16" else torch.float16
            replica.register_comm_hook(dtype, lambda dtype, bucket: average_in(dtype, bucket))
        elif self._powersgd is not None:
            replica.register_comm_hook(self._powersgd, lambda powersgd, bucket: powersgd.average(bucket))
        elif sparse_parameters([self.model]):
            replica.register_comm_hook(None, lambda _, bucket: average(bucket))

    def sync_initial_state(self) -> None:
        tensors = (*self.model.parameters(), *self.model.buffers())
        broadcast_tensors(tensors, source=0, device=self.context.device)

    def train_step(self, microbatches: Sequence[Any], *, want_grad_norm: bool, want_metrics: bool) -> StepResult:
        train = self.context.train
        self._step += 1
        self._timed = self._step % train.log_every == 0 or self._step in (1, train.steps)
        # DDP synchronises with the device to read its timers, so they are sampled only in steps that are logged.
        assert self.replica is not None
        set_ddp_timing(self.replica, enabled=self._timed)
        for norm in self._norms:
            norm.waited_s = 0.0
        return super().train_step(microbatches, want_grad_norm=want_grad_norm, want_metrics=want_metrics)

    def capture(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState | None:
        powersgd = self._powersgd.state() if self._powersgd is not None else {}
        state = super().capture(step=step, samples_consumed=samples_consumed, into=into)
        if state is not None:
            # No parameter has these names, so other strategies ignore the tensors.
            state.optimizer.update({name: tensor.to("cpu", copy=True) for name, tensor in powersgd.items()})
        return state

    def restore(self, state: TrainState | None, *, source: int) -> dict[str, Any]:
        context = self.context
        state = broadcast_state(state, source=source, rank=context.global_rank, device=context.device)
        if self._powersgd is not None:
            self._powersgd.load_state(state.optimizer, steps=state.step)
        return super().restore(state, source=context.global_rank)

    def _continue_from(self, step: int) -> None:
        self._step = step

    def recoverable_steps(self, step: int) -> RecoverableSteps:
        """Return the last step for any rank, as all are equal; nothing with PowerSGD, whose errors differ by rank."""
        return {} if self._powersgd is not None else {ANY_RANK: (step,)}

    def close(self) -> None:
        """Release everything that references the process group.

        Its connections then close, which frees the ranks that wait for this one. If the reducer were the last owner of
        the group, its destructor would wait for gloo's threads while it holds the GIL, which they may be waiting for.
        """
        if self.replica is None:
            return
        self.forward_model = forward_module(self.job, self.model)
        release_ddp(self.replica)
        self.replica = None

    def comm_ms(self) -> float | None:
        if not self._timed:
            return None
        assert self.replica is not None
        gradients_ms = ddp_comm_ms(self.replica)
        if gradients_ms is None:
            return None
        return gradients_ms + 1e3 * sum(norm.waited_s for norm in self._norms)

    def _sum_over_ranks(self, weight: float | Tensor) -> float | Tensor:
        total = on_device(weight, self.context.device)
        dist.all_reduce(total)
        return total

    @contextlib.contextmanager
    def _gradient_sync(self, last: bool) -> Iterator[None]:
        # The forward pass must be inside as well, because DDP decides there whether to synchronise.
        assert self.replica is not None
        with contextlib.nullcontext() if last else self.replica.no_sync():
            try:
                yield
            except RuntimeError as e:
                # A parameter was used in an earlier slice of the previous step, but not in its last one.
                if "finished reduction in the prior iteration" not in str(e):
                    raise
                raise ValueError(f"set strategy.find_unused_parameters=true: {e}") from e

    def _after_backward(self) -> None:
        if not self._options.find_unused_parameters and any(p.grad is None for p in self.parameters):
            unused = [n for n, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
            raise ValueError(
                f"parameters that take no part in the loss: {', '.join(unused)}; the other ranks would wait for "
                "their gradients. Use them, freeze them (requires_grad=False), or set "
                "strategy.find_unused_parameters=true"
            )
        broadcast_tensors(self._buffers(), source=0, device=self.context.device)

    def forget_step(self) -> None:
        super().forget_step()
        if self._powersgd is not None:
            self._powersgd.forget()


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
