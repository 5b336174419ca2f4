"""The training step of a rank that has an optimizer, for the whole model or for some stages of it."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from orchestrator.compat.torch import copies_of, copy_all, multiply, own_buffers
from orchestrator.job import Job
from orchestrator.model.batch import split_batch, to_device
from orchestrator.model.precision import Precision
from orchestrator.protocol.metrics import Metric, MetricSpec, measured
from orchestrator.state import train_state
from orchestrator.state.joint import AnyScheduler
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.base import Context, StepResult, Strategy
from orchestrator.strategies.device_precision import prepare_device
from orchestrator.strategies.fused_updates import fuse_updates, sparse_parameters
from orchestrator.strategies.gradients import clip
from orchestrator.strategies.job_metrics import add_metrics, has_train_metrics, train_metrics
from orchestrator.strategies.job_optimizer import scheduler_of
from orchestrator.strategies.loss_scale import LossScale
from orchestrator.strategies.memory import TensorSize, sizes_of
from orchestrator.strategies.weight_average import averaged, keep_average

LOSS_SCALE = MetricSpec(name="train/loss_scale")


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
    _steps_per_epoch: float | None = None
    """Set in :meth:`setup`; None if it is not known."""

    def __init__(self, context: Context, job: Job):
        super().__init__(context, job)
        name = context.train.precision
        prepare_device(name, context.device)
        self.precision = Precision.named(name, context.device.type)
        self.loss_scale = LossScale() if name == "fp16" else None

    def attach(self) -> None:
        if self._in_step:
            self.forget_step()

    def use(self, optimizer: Optimizer) -> None:
        """Update the parameters with ``optimizer``, by the schedule of the job."""
        self._fuse(optimizer)
        self.optimizer = optimizer
        self.scheduler = self._scheduler_of(optimizer)
        if (decay := self.context.train.ema_decay) is not None:
            keep_average(optimizer, decay)

    def _scheduler_of(self, optimizer: Optimizer) -> LRScheduler | None:
        steps = self.context.train.steps
        return scheduler_of(self.job, optimizer, steps=steps, steps_per_epoch=self._steps_per_epoch)

    def _fuse(self, optimizer: Optimizer) -> None:
        """Let the optimizer update all parameters with one kernel, on a GPU."""
        if self.context.device.type == "cuda":
            fuse_updates(optimizer, device_type="cuda", sparse=sparse_parameters(self._modules()))

    def train_step(self, microbatches: Sequence[Any], *, want_grad_norm: bool, want_metrics: bool) -> StepResult:
        context, train = self.context, self.context.train
        slices = [self._on_device(batch) for batch in microbatches]
        weights, total_weight = self._weigh(slices)
        scale = self.loss_scale
        may_skip = train.on_nonfinite == "skip" or scale is not None
        may_be_undone = may_skip or context.mesh.world_size > 1
        self._buffers_before = copies_of(self._buffers(), into=self._buffers_before) if may_be_undone else []
        self._in_step = True
        self._metrics = {} if want_metrics and has_train_metrics(self.job) else None
        self.optimizer.zero_grad()
        loss_sum = self._backward(slices, weights, total_weight if scale is None else total_weight / scale.factor)
        if scale is not None:
            multiply([p.grad for p in self.parameters if p.grad is not None], 1 / scale.factor)
        norm: Tensor | None = None
        if train.clip_norm is not None or may_skip or want_grad_norm:
            norm = self._gradient_norm()
        weight = torch.as_tensor(sum(weights), dtype=torch.float32)
        metrics = self._metrics or {}
        self.confirm()
        # Here the host waits for the device, because the update depends on it. The norm is that of the whole gradient,
        # summed over replicas and stages, so that all ranks skip the same steps.
        finite = not may_skip or norm is None or bool(torch.isfinite(norm))
        if scale is not None:
            self.loss_scale = scale.after(finite=finite)
        if not finite and (train.on_nonfinite == "skip" or (scale is not None and scale.can_fall)):
            self.forget_step()
            return StepResult(loss_sum=loss_sum, weight=weight, grad_norm=norm, skipped=True, metrics=metrics)
        self._clip(norm)
        self._update()
        self._schedule()
        self._in_step = False
        return StepResult(loss_sum=loss_sum, weight=weight, grad_norm=norm, metrics=metrics)

    def snapshot(
        self, *, step: int, samples_consumed: int, into: TrainState | None = None, live: bool = False
    ) -> TrainState:
        """Return this rank's part of the training state: a copy in host memory, or the ``live`` tensors.

        ``into``: an old snapshot whose memory is reused.
        """
        return train_state.capture(
            self.state_module(),
            self.optimizer,
            self.scheduler,
            step=step,
            samples_consumed=samples_consumed,
            into=into,
            live=live,
            **({} if self.loss_scale is None else {"loss_scale": self.loss_scale.state()}),
        )

    def load(self, state: TrainState, *, partial: bool = False, consume: bool = False) -> None:
        """Load this rank's part of ``state``, which has more parts if ``partial``, as ``train_state.restore`` does."""
        self.confirm()
        module = self.state_module()
        train_state.restore(state, module, self.optimizer, self.scheduler, partial=partial, consume=consume)
        if self.loss_scale is not None:
            self.loss_scale = LossScale.of_state(state.meta.get("loss_scale"))

    def state_module(self) -> nn.Module:
        """Return a module with the tensors of this rank, under the model's own names."""
        return self.model

    def tensor_sizes(self) -> Iterable[TensorSize]:
        return sizes_of(self.state_module(), self.optimizer)

    def metrics(self) -> Mapping[str, Metric]:
        return measured({LOSS_SCALE: None if self.loss_scale is None else self.loss_scale.factor})

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
        copy_all(self._buffers_before, to=self._buffers())
        self._in_step = False

    @abc.abstractmethod
    def _weigh(self, slices: Sequence[Any]) -> tuple[Sequence[float | Tensor], float | Tensor]:
        """Return the weight of each of this rank's slices, and the weight of the global batch."""

    @abc.abstractmethod
    def _backward(
        self, slices: Sequence[Any], weights: Sequence[float | Tensor], total_weight: float | Tensor
    ) -> Tensor:
        """Compute the gradients of the global batch by forward and backward passes.

        Args:
            slices: the slices of this rank's share of the batch, as pairs of inputs and targets on the device.
            weights: the weight of each slice.
            total_weight: what the weights are divided by for the gradients: the weight of the global batch, divided by
                the scale of the loss.

        Returns:
            The summed loss of this rank, a scalar.
        """

    @abc.abstractmethod
    def _gradient_norm(self) -> Tensor:
        """Return the 2-norm of the gradient of the whole model."""

    def _on_device(self, batch: Any) -> tuple[Any, Any]:
        """Return the inputs and the target of a batch on the device, the inputs in the model's dtype."""
        inputs, target = split_batch(to_device(batch, self.context.device))
        return self.precision.inputs(inputs), target

    def _measure(self, output: Any, target: Any) -> None:
        """Add the job's metrics of a part of the batch, in a step for which they are wanted."""
        if self._metrics is not None:
            add_metrics(self._metrics, train_metrics(self.job, output, target))

    def _modules(self) -> Sequence[nn.Module]:
        """Return what is trained on this rank."""
        return [self.model]

    def _buffers(self) -> Sequence[Tensor]:
        """Return the buffers on this rank. A layer may replace its own, so only the walk over the modules is cached."""
        every = (buffer for own in self._own_buffers for buffer in own.values() if buffer is not None)
        return list(dict.fromkeys(every))

    @functools.cached_property
    def _own_buffers(self) -> Sequence[Mapping[str, Tensor | None]]:
        return [own_buffers(module) for module in nn.ModuleList(self._modules()).modules()]

    def _clip(self, norm: Tensor | None) -> None:
        clip(self.parameters, self.context.train, norm)

    def _update(self) -> None:
        self.optimizer.step()

    def _schedule(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()
