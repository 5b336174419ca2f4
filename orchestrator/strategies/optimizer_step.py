"""The training step of a rank that has an optimizer, for the whole model or for some stages of it."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.model.batch import split_batch, to_device
from orchestrator.model.precision import Precision
from orchestrator.state import train_state
from orchestrator.state.joint import AnyScheduler
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.base import StepResult, Strategy
from orchestrator.strategies.job_metrics import add_metrics, has_train_metrics, train_metrics
from orchestrator.strategies.weight_average import averaged, keep_average


class OptimizerStep(Strategy):
    """Forward and backward passes, clipping, update and learning-rate schedule; may skip non-finite gradients.

    A subclass sets ``model`` and ``parameters``, and calls :meth:`use`, before the first step.
    """

    model: nn.Module
    parameters: Sequence[nn.Parameter]
    optimizer: Optimizer
    scheduler: AnyScheduler | None
    _buffers_before: Sequence[Tensor] = ()
    _in_step = False
    _metrics: dict[str, Tensor] | None = None
    """The sums of the job's metrics in this step; None if they are not wanted."""

    def attach(self) -> None:
        if self._in_step:
            self.forget_step()

    def use(self, optimizer: Optimizer) -> None:
        """Update the parameters with ``optimizer``, by the schedule of the job."""
        self.optimizer = optimizer
        self.scheduler = self.job.scheduler(optimizer, self.context.train.steps)
        if (decay := self.context.train.ema_decay) is not None:
            keep_average(optimizer, decay)

    def train_step(self, microbatches: Sequence[Any], *, want_grad_norm: bool, want_metrics: bool) -> StepResult:
        context, train = self.context, self.context.train
        slices = [split_batch(to_device(b, context.device)) for b in microbatches]
        weights, total_weight = self._weigh(slices)
        may_be_undone = train.on_nonfinite == "skip" or context.mesh.world_size > 1
        self._buffers_before = [b.clone() for b in self._buffers()] if may_be_undone else []
        self._in_step = True
        self._metrics = {} if want_metrics and has_train_metrics(self.job) else None
        self.optimizer.zero_grad()
        loss_sum = self._backward(slices, weights, total_weight)
        norm: Tensor | None = None
        if train.clip_norm is not None or train.on_nonfinite == "skip" or want_grad_norm:
            norm = self._gradient_norm()
        weight = torch.as_tensor(sum(weights), dtype=torch.float32)
        metrics = self._metrics or {}
        if norm is not None and train.on_nonfinite == "skip" and not torch.isfinite(norm):
            # With `skip`, isfinite() makes the host wait for the device in every step: the update depends on it.
            self.forget_step()
            return StepResult(loss_sum=loss_sum, weight=weight, grad_norm=norm, skipped=True, metrics=metrics)
        if norm is not None and train.clip_norm is not None:
            self._clip(norm)
        self._update()
        self._schedule()
        self._in_step = False
        return StepResult(loss_sum=loss_sum, weight=weight, grad_norm=norm, metrics=metrics)

    def snapshot(self, *, step: int, samples_consumed: int, into: TrainState | None = None) -> TrainState:
        """Copy this rank's part of model, optimizer and scheduler to host memory, reusing that of ``into``."""
        return train_state.capture(
            self.model, self.optimizer, self.scheduler, step=step, samples_consumed=samples_consumed, into=into
        )

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        return averaged(self.optimizer)

    @property
    def lr(self) -> float:
        return self.group_lrs[0]

    @property
    def group_lrs(self) -> Sequence[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def forget_step(self) -> None:
        """Undo a step that made no update: restore the buffers that its forward pass changed."""
        for buffer, before in zip(self._buffers(), self._buffers_before, strict=True):
            buffer.copy_(before)
        self._in_step = False

    @abc.abstractmethod
    def _weigh(self, slices: Sequence[Any]) -> tuple[Sequence[float | Tensor], float | Tensor]:
        """Return the weight of each of this rank's slices, and the weight of the global batch."""

    @abc.abstractmethod
    def _backward(
        self, slices: Sequence[Any], weights: Sequence[float | Tensor], total_weight: float | Tensor
    ) -> Tensor:
        """Compute the gradients of the global batch by forward and backward passes.

        Returns:
            The summed loss of this rank, a scalar.
        """

    @abc.abstractmethod
    def _gradient_norm(self) -> Tensor:
        """Return the 2-norm of the gradient of the whole model."""

    def _measure(self, output: Any, target: Any) -> None:
        """Add the job's metrics of a part of the batch, in a step for which they are wanted."""
        if self._metrics is not None:
            add_metrics(self._metrics, train_metrics(self.job, output, target))

    def _buffers(self) -> Sequence[Tensor]:
        return list(self.model.buffers())

    def _clip(self, norm: Tensor) -> None:
        assert self.context.train.clip_norm is not None
        nn.utils.clip_grads_with_norm_(self.parameters, self.context.train.clip_norm, norm)

    def _update(self) -> None:
        self.optimizer.step()

    def _schedule(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    @property
    def precision(self) -> Precision:
        """What forward passes and losses are computed in."""
        dtype = torch.bfloat16 if self.context.train.precision == "bf16" else None
        return Precision(self.context.device.type, dtype)
