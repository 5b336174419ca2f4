"""Communication hooks for ``ddp``: average gradients in half precision, as low-rank factors, or as sparse rows.

PowerSGD (Vogels et al., NeurIPS 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization") approximates a gradient matrix M by P Q^T with few columns. The ranks average M Q and orthonormalize it
to P, then average M^T P to Q. Each rank adds the part of its own gradient that P Q^T does not cover, its error, to its
next gradient. Errors and factors are kept by parameter name instead of by bucket, so that a run can continue with any
number of ranks.

PyTorch's own PowerSGD hook is not used because its stages wait for each other inside gloo's threads: with two
buckets in flight they deadlock, and a process group that ends too early aborts the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from orchestrator.strategies.update.gradients import sparse_sum

POWERSGD_WARM_UP_STEPS = 10
"""Steps at the start of a run that average full gradients, because these change too fast for the factors to follow."""


def average(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket over the ranks, as ``DistributedDataParallel`` does without a hook, but also with NCCL."""
    if bucket.buffer().is_sparse:
        return average_in(bucket.buffer().dtype, bucket)
    assert dist.group.WORLD is not None
    return allreduce_hook(dist.group.WORLD, bucket)


def average_in(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket over the ranks in ``dtype``. Divides before the cast, so that fp16 does not overflow."""
    buffer = bucket.buffer()
    compressed = (buffer / dist.get_world_size()).to(dtype)
    if buffer.is_sparse:
        return _completed(sparse_sum(compressed).to(buffer.dtype))
    work = dist.all_reduce(compressed, async_op=True)
    assert work is not None

    def decompress(_: torch.futures.Future[Any]) -> Tensor:
        return buffer.copy_(compressed)

    average: torch.futures.Future[Tensor] = work.get_future().then(decompress)
    return average


class PowerSGD:
    """Averages buckets as low-rank factors. Keeps this rank's errors, and the factors Q, which all ranks share."""

    def __init__(self, model: nn.Module, *, approximation_rank: int):
        """``approximation_rank``: the number of columns of the factors, at most."""
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._approximation_rank = approximation_rank
        self._steps = 0
        self._errors: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average ``bucket`` over the ranks, in place."""
        warm = self._steps >= POWERSGD_WARM_UP_STEPS
        self._steps += bucket.is_last()
        buffer = bucket.buffer()
        if not warm or buffer.is_sparse:
            return average_in(buffer.dtype, bucket)
        self._average_factors(bucket)
        return _completed(buffer)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save: the factors and the mean of the errors over the ranks. Collective.

        Returns:
            Tensors under ``powersgd.error/<parameter>`` and ``powersgd.factor/<parameter>``.
        """
        names = sorted(self._errors)
        errors = [self._errors[name].clone() for name in names]
        _average(errors)
        factors = {f"powersgd.factor/{name}": self._factors[name] for name in names}
        return {f"powersgd.error/{name}": error for name, error in zip(names, errors, strict=True)} | factors

    def load_state(self, tensors: Mapping[str, Tensor], *, steps: int) -> None:
        """Continue after ``steps`` steps of the run with the result of :meth:`state`; other ``tensors`` are ignored."""
        self.forget()
        self._steps = steps
        device = next(iter(self._names)).device
        for path in tensors:
            kind, _, name = path.partition("/")
            if kind == "powersgd.error":
                self._errors[name] = tensors[path].to(device)
            elif kind == "powersgd.factor":
                self._factors[name] = tensors[path].to(device)

    def forget(self) -> None:
        """Drop errors and factors. A NaN in them would stay forever."""
        self._errors.clear()
        self._factors.clear()

    def _average_factors(self, bucket: dist.GradBucket) -> None:
        """Average the large matrices of a bucket as ``P`` and ``Q`` and everything else in full, in place.

        A matrix without a gradient on any rank took no part in the step, and DDP ignores its result: its error is
        kept for a later step.
        """
        uncompressed: list[Tensor] = []
        gradients: dict[str, Tensor] = {}
        matrices: dict[str, Tensor] = {}
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            columns = self._columns(gradient)
            if columns is None:
                uncompressed.append(gradient)
                continue
            name = self._names[parameter]
            gradients[name] = gradient
            matrices[name] = gradient.flatten(1).float() + self._errors.get(name, 0.0)
            if name not in self._factors or self._factors[name].shape[1] != columns:
                self._factors[name] = _random(matrices[name].shape[1], columns).to(gradient.device)
        ps = [m @ self._factors[name] for name, m in matrices.items()]
        used = [gradient.any().float() for gradient in gradients.values()]
        _average([*uncompressed, *ps, *used])
        ps = [torch.linalg.qr(p).Q for p in ps]
        own = [m.T @ p for m, p in zip(matrices.values(), ps, strict=True)]
        qs = [q.clone() for q in own]
        _average(qs)
        for (name, m), p, q, own_q, share in zip(matrices.items(), ps, qs, own, used, strict=True):
            p = p * (share > 0)
            self._errors[name] = m - p @ own_q.T
            self._factors[name] = q
            gradients[name].copy_((p @ q.T).view_as(gradients[name]))

    def _columns(self, gradient: Tensor) -> int | None:
        """Return the number of columns of the factors, or None if they would exceed half the size of the gradient."""
        if gradient.ndim < 2:
            return None
        rows, columns = len(gradient), gradient[0].numel()
        rank = min(self._approximation_rank, rows, columns)
        return rank if 2 * rank * (rows + columns) <= rows * columns else None


def _completed(result: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future that has its result."""
    done = torch.futures.Future[Tensor](devices=[result.device] if result.is_cuda else None)
    done.set_result(result)
    return done


def _average(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its mean over the ranks, with a single all-reduce."""
    if not tensors:
        return
    flat = torch.cat([t.flatten() for t in tensors]) / dist.get_world_size()
    dist.all_reduce(flat)
    for tensor, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(mean.view(tensor.shape))


def _random(rows: int, columns: int) -> Tensor:
    """Return the same matrix on every rank, without touching the default generator, which dropout uses."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
