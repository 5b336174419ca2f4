"""``ddp``: ``DistributedDataParallel``, a replica of the model on every worker.

Each rank computes the loss of its share of the global batch; the gradients are averaged bucket by
bucket while the backward pass goes on, once a step, whatever the accumulation. The loss of a rank is
weighted by its part of the global weight, so that uneven shares are exact. Every rank makes the
same update and has the buffers of rank 0 after it; rank 0 saves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from orchestrator.compat.torch import broadcast_ddp_buffers, ddp_comm_ms, release_ddp, set_ddp_timing
from orchestrator.config.schema import StrategyConfig, option
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import broadcast_state
from orchestrator.strategies.base import StepResult
from orchestrator.strategies.registry import register
from orchestrator.strategies.replicated.comm_hooks import PowerSGD, average_in
from orchestrator.strategies.replicated.whole_model import WholeModel


@dataclass(frozen=True, kw_only=True)
class DDPConfig(StrategyConfig):
    elastic = True

    name: Literal["ddp"]
    bucket_mb: float = option("size of the gradient buckets in MiB", above=0)
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = option("gradient compression")
    powersgd_rank: int = option("rank of the PowerSGD approximation", minimum=1)
    find_unused_parameters: bool = option("allow parameters that take no part in a step")


@register("ddp")
class DDP(WholeModel):
    config_class: ClassVar[type[StrategyConfig]] = DDPConfig

    def setup(self, train_set: Dataset[Any]) -> None:
        super().setup(train_set)
        options = self.context.options
        assert isinstance(options, DDPConfig)
        self._options = options
        self._step = 0
        self._timed = False
        self._has_buffers = any(True for _ in self.model.buffers())
        self._powersgd: PowerSGD | None = None
        if options.comm_hook == "powersgd":
            self._powersgd = PowerSGD(self.model, approximation_rank=options.powersgd_rank)

    def attach(self) -> None:
        super().attach()
        options = self._options
        # With it, DDP's own errors name parameters instead of counting them.
        dist.set_debug_level(dist.DebugLevel.INFO)
        self.replica = DistributedDataParallel(
            self.model,
            device_ids=None if self.context.device.type == "cpu" else [self.context.device],
            bucket_cap_mb=options.bucket_mb,
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=True,
            init_sync=False,  # the ranks may stand at different steps yet
            forward_sync_buffers=False,  # before the next forward pass is too late for evaluation
        )
        self.forward_model = self.replica
        # Lambdas, because DDP compares the annotations of a hook, which are mere text in this file.
        if options.comm_hook in ("bf16", "fp16"):
            dtype = torch.bfloat16 if options.comm_hook == "bf16" else torch.float16
            self.replica.register_comm_hook(dtype, lambda dtype, bucket: average_in(dtype, bucket))
        elif self._powersgd is not None:
            self.replica.register_comm_hook(self._powersgd, lambda powersgd, bucket: powersgd.average(bucket))

    def sync_initial_state(self) -> None:
        for tensor in self.model.state_dict().values():
            dist.broadcast(tensor, src=0)

    def train_step(self, microbatches: Sequence[Any], *, want_grad_norm: bool) -> StepResult:
        train = self.context.train
        self._step += 1
        self._timed = self._step % train.log_every == 0 or self._step in (1, train.steps)
        # Reading its clocks, DDP waits for the device: in steps that are logged alone.
        set_ddp_timing(self.replica, enabled=self._timed)
        return super().train_step(microbatches, want_grad_norm=want_grad_norm)

    def capture(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState | None:
        powersgd = self._powersgd.state() if self._powersgd is not None else {}
        state = super().capture(step=step, samples_consumed=samples_consumed, into=into)
        if state is not None:
            # Under names that no parameter has: other strategies leave them alone.
            state.optimizer.update({name: tensor.to("cpu", copy=True) for name, tensor in powersgd.items()})
        return state

    def restore(self, state: TrainState | None, *, source: int) -> dict[str, Any]:
        context = self.context
        state = broadcast_state(state, source=source, rank=context.global_rank, device=context.device)
        if self._powersgd is not None:
            self._powersgd.load_state(state.optimizer, steps=state.step)
        meta = super().restore(state, source=context.global_rank)
        self._step = meta["step"]
        return meta

    def recoverable_steps(self, step: int, *, update_complete: bool) -> Mapping[int, tuple[int, ...]]:
        """Everything, except where ranks have something of their own, as the errors of PowerSGD are."""
        if not update_complete or self._powersgd is not None:
            return {}
        return {rank: (step,) for rank in range(self.context.mesh.world_size)}

    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        source, state = sources[0], None  # all have the same state
        if self.context.global_rank == source:
            assert step == source_step
            state = self.snapshot(step=step, samples_consumed=samples_consumed)
        return self.restore(state, source=source)

    def close(self) -> None:
        """Give up all that holds the process group. Its connections close with it, which frees the ranks that wait for
        this one; and the reducer, as its last owner, would wait for gloo's threads while it holds the interpreter, and
        they may be waiting for that."""
        if (replica := vars(self).pop("replica", None)) is not None:
            self.forward_model = self.model
            release_ddp(replica)

    def comm_ms(self) -> float | None:
        return ddp_comm_ms(self.replica) if self._timed else None

    def _sum_over_ranks(self, weight: float | Tensor) -> float | Tensor:
        total = torch.as_tensor(weight, dtype=torch.float32, device=self.context.device).clone()
        dist.all_reduce(total)
        return total

    @contextlib.contextmanager
    def _gradient_sync(self, last: bool) -> Iterator[None]:
        # Forward and backward both have to be inside: DDP decides in the forward pass.
        with contextlib.nullcontext() if last else self.replica.no_sync():
            try:
                yield
            except RuntimeError as e:
                # Used in an early micro-batch of the step before and not in its last one.
                if "finished reduction in the prior iteration" not in str(e):
                    raise
                raise ValueError(f"set strategy.find_unused_parameters=true: {e}") from e

    def _after_backward(self) -> None:
        if not self._options.find_unused_parameters and any(p.grad is None for p in self.parameters):
            unused = [n for n, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
            raise ValueError(
                f"parameters that take no part in the loss: {', '.join(unused)}; the other ranks "
                "would wait for their gradients. Use them, freeze them (requires_grad=False), or "
                "set strategy.find_unused_parameters=true"
            )
        if self._has_buffers:
            broadcast_ddp_buffers(self.replica)

    def forget_step(self) -> None:
        super().forget_step()
        if self._powersgd is not None:
            self._powersgd.forget()
