"""BatchNorm with the statistics of the global batch, for ``ddp``.

``nn.SyncBatchNorm`` needs CUDA. The modules of this file do the same on any device: the forward pass sums count, sum
and sum of squares over the ranks, the backward pass sums the two means that the gradient contains. Both are exact when
the ranks have different numbers of samples.

The modules of a model are converted in place, by changing their class, so that the names of parameters and buffers,
hooks and references to a module stay as they are. Statistics are exchanged in the process group that is the default
one at the time, so a module outlives its group.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from orchestrator.compat.torch import BatchNorm
from orchestrator.config.text import first_few
from orchestrator.planning.plan import Plan


class SyncBatchNorm(BatchNorm):
    """A BatchNorm that trains with the statistics of all ranks. It is a plain one in evaluation and on a single rank.

    Attributes:
        waited_s: the time that its exchanges have taken so far, in seconds.
    """

    waited_s = 0.0

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        normalize: Any = _Normalize.apply
        output, mean, variance, count = normalize(input, self.weight, self.bias, self.eps, self)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self._track(mean, variance * (count / (count - 1)))
        out: Tensor = output
        return out

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        """Replace ``sums`` by their sum over all ranks."""
        began = time.perf_counter()
        dist.all_reduce(sums)
        self.waited_s += time.perf_counter() - began
        return sums

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Add the mean and the unbiased variance of a batch to the running statistics."""
        assert self.running_mean is not None
        assert self.running_var is not None
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # a cumulative average
                momentum = 1 / float(self.num_batches_tracked)
        momentum = momentum or 0.0
        self.running_mean.mul_(1 - momentum).add_(mean.to(self.running_mean.dtype), alpha=momentum)
        self.running_var.mul_(1 - momentum).add_(variance.to(self.running_var.dtype), alpha=momentum)


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` with the statistics of all ranks."""


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` with the statistics of all ranks."""


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` with the statistics of all ranks."""


SYNCHRONIZED: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}
"""The classes that :func:`synchronize` converts, and what they become where ``nn.SyncBatchNorm`` does not work."""


def synchronize(model: nn.Module, device: torch.device) -> tuple[SyncBatchNorm, ...]:
    """Let every BatchNorm of ``model`` use the statistics of all ranks. Changes the modules in place.

    On CUDA they become torch's ``nn.SyncBatchNorm``, which is faster.

    Args:
        model: the model. Its own ``nn.SyncBatchNorm`` modules stay as they are.
        device: the device on which it trains.

    Returns:
        The converted modules that measure how long they wait; none on CUDA.

    Raises:
        ValueError: a module cannot be converted, because it is a BatchNorm of another class.
    """
    if error := conversion_error(model):
        raise ValueError(error)
    converted: list[SyncBatchNorm] = []
    for module in model.modules():
        if type(module) not in SYNCHRONIZED:
            continue
        if device.type == "cuda":
            module.__class__ = nn.SyncBatchNorm
            assert isinstance(module, nn.SyncBatchNorm)
            module.process_group = None  # the default group at the time of a forward pass
            continue
        module.__class__ = SYNCHRONIZED[type(module)]
        assert isinstance(module, SyncBatchNorm)
        converted.append(module)
    return tuple(converted)


def conversion_error(model: nn.Module) -> str | None:
    """Return why :func:`synchronize` refuses ``model``; None if it does not."""
    for name, module in model.named_modules():
        known = type(module) in SYNCHRONIZED or isinstance(module, (nn.SyncBatchNorm, SyncBatchNorm))
        if isinstance(module, BatchNorm) and not known:
            kind = type(module).__name__
            return (
                f"strategy.sync_batchnorm=true: {name} is a {kind}, whose own code would be lost; "
                "use nn.BatchNorm1d, 2d or 3d, or strategy.sync_batchnorm=false"
            )
    return None


def check_batchnorm(model: nn.Module | None, plan: Plan, *, synchronized: bool, errors: list[str]) -> tuple[str, ...]:
    """Find out whether BatchNorm makes the losses differ from ``strategy=single``.

    Args:
        model: the model, which may have no memory; None if it is unknown.
        plan: the plan of the run.
        synchronized: the value of ``strategy.sync_batchnorm``.
        errors: receives the reason why the model's modules cannot be synchronized.

    Returns:
        Notes for the user, printed with the plan.
    """
    replicas = plan.mesh.data_parallel_size * plan.devices_per_worker
    if replicas * plan.grad_accumulation == 1:
        return ()
    seen, remedy = f"slices of {plan.global_batch_size // plan.grad_accumulation} samples", ""
    if replicas > 1:
        seen = f"each {'device' if plan.devices_per_worker > 1 else 'worker'}'s own samples"
        remedy = "; strategy=ddp strategy.sync_batchnorm=true uses the statistics of all workers"
    if model is None:
        if synchronized:
            return ()  # the workers check their model
        return (
            "job.model() cannot be built without memory, so nothing is known about BatchNorm: if the model has "
            f"any, it uses the statistics of {seen}{remedy}",
        )
    if synchronized and (error := conversion_error(model)):
        errors.append(error)
        return ()
    norms = {n: m for n, m in model.named_modules() if isinstance(m, BatchNorm) and m.training}
    names = [name for name, norm in norms.items() if not isinstance(norm, nn.SyncBatchNorm)]
    if not names:
        return ()
    what = f"BatchNorm ({first_few(names, 2)})"
    if not synchronized:
        return (
            f"{what} uses the statistics of {seen}, with strategy=single those of the whole batch: expect another "
            f"loss curve{remedy}",
        )
    if plan.grad_accumulation > 1:
        return (
            f"{what} uses the statistics of micro-batches over all workers; with "
            f"train.grad_accumulation={plan.grad_accumulation} these hold other samples than with strategy=single: "
            "expect another loss curve",
        )
    return ()


class _Normalize(torch.autograd.Function):
    """Normalizes a batch that is spread over the ranks: Ioffe and Szegedy (2015), "Batch Normalization".

    Statistics are computed in float32 at least, and combined in float64, because the variance is a difference of sums.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, norm: SyncBatchNorm
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the normalized ``inputs``, and of the global batch the mean, the biased variance and the count.

        Args:
            ctx: the context for the backward pass.
            inputs: shape (samples, channels, ...).
            weight: shape (channels,); None without affine parameters, as ``bias``.
            bias: shape (channels,).
            eps: added to the variance.
            norm: exchanges the sums.
        """
        x = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        count = x.numel() // x.shape[1]
        own = [x.new_zeros(x.shape[1])] * 2
        if count:
            own = list(torch.var_mean(x, dim=_reduced_dims(x), correction=0))
        variance, mean = (t.double() for t in own)
        size = torch.full((1,), count, dtype=torch.float64, device=x.device)
        sums = norm.sum_over_ranks(torch.cat([size, count * mean, count * (variance + mean.square())]))
        size, mean, squares = sums.split([1, x.shape[1], x.shape[1]])
        mean = mean / size
        variance = (squares / size - mean.square()).clamp(min=0)
        scale = (variance + eps).rsqrt().to(x.dtype)
        output = (x - _per_channel(mean.to(x.dtype), x)) * _per_channel(scale, x)
        if weight is not None:
            output = output * _per_channel(weight.to(x.dtype), x)
        if bias is not None:
            output = output + _per_channel(bias.to(x.dtype), x)
        ctx.save_for_backward(inputs, weight, mean, scale, size)
        ctx.norm = norm
        ctx.mark_non_differentiable(mean, variance, size)
        return output.to(inputs.dtype), mean, variance, size

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, mean, scale, size = ctx.saved_tensors
        x = inputs.to(scale.dtype)
        g = gradient.to(scale.dtype)
        normal = (x - _per_channel(mean.to(x.dtype), x)) * _per_channel(scale, x)
        grad_bias, grad_weight = g.sum(_reduced_dims(x)), (g * normal).sum(_reduced_dims(x))
        grad_inputs = None
        if ctx.needs_input_grad[0]:
            sums = ctx.norm.sum_over_ranks(torch.cat([grad_bias, grad_weight]).double())
            mean_g, mean_g_normal = (sums / size).to(x.dtype).chunk(2)
            grad_inputs = (g - _per_channel(mean_g, x) - normal * _per_channel(mean_g_normal, x)) * _per_channel(
                scale, x
            )
            if weight is not None:
                grad_inputs = grad_inputs * _per_channel(weight.to(x.dtype), x)
            grad_inputs = grad_inputs.to(inputs.dtype)
        # The gradients of weight and bias come from this rank's samples; DDP averages them.
        return (
            grad_inputs,
            grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            grad_bias.to(weight.dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def _reduced_dims(x: Tensor) -> list[int]:
    """Return the dimensions that the statistics of a channel cover."""
    return [d for d in range(x.ndim) if d != 1]


def _per_channel(channels: Tensor, x: Tensor) -> Tensor:
    """Return a vector with a value for each channel in a shape that broadcasts with ``x``."""
    return channels.view(1, -1, *[1] * (x.ndim - 2))
