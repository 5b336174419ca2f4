"""How DDP's gradients are averaged where not in full: in half precision, or as low-rank factors.

PowerSGD approximates a gradient matrix M by P Q^T with few columns. Each rank sends its M Q, all agree
on an orthonormal P of the sum, each sends its M^T P, and the averages are the part of the average
gradient that P spans. What a rank's own matrix has beyond that, its error, is added to its next
gradient. All is kept by parameter name and not by bucket, so that any number of ranks can go on
with it.

It is not torch's own hook, whose parts wait for each other inside gloo's threads: with two buckets
under way they stand still for ever, and a process group that ends too early ends the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

POWERSGD_WARM_UP_STEPS = 10
"""First steps of a run, in which gradients change too fast for factors and are averaged in full."""


def average_in(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket in ``dtype``. Divides before it casts, so that fp16 does not overflow."""
    buffer = bucket.buffer()
    compressed = (buffer / dist.get_world_size()).to(dtype)
    work = dist.all_reduce(compressed, async_op=True)
    assert work is not None

    def decompress(_: torch.futures.Future[Any]) -> Tensor:
        return buffer.copy_(compressed)

    average: torch.futures.Future[Tensor] = work.get_future().then(decompress)
    return average


class PowerSGD:
    """Averages buckets, and remembers the errors of this rank and the factors Q, equal on all."""

    def __init__(self, model: nn.Module, *, approximation_rank: int):
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._approximation_rank = approximation_rank
        self._steps = 0
        self._errors: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        warm = self._steps >= POWERSGD_WARM_UP_STEPS
        self._steps += bucket.is_last()
        buffer = bucket.buffer()
        if not warm or buffer.is_sparse:
            return average_in(buffer.dtype, bucket)
        self._average_factors(bucket)
        done = torch.futures.Future[Tensor](devices=[buffer.device] if buffer.is_cuda else None)
        done.set_result(buffer)
        return done

    def state(self) -> dict[str, Tensor]:
        """What a run goes on from, with the mean of the errors over the ranks. All ranks call it."""
        names = sorted(self._errors)
        errors = [self._errors[name].clone() for name in names]
        _average(errors)
        factors = {f"powersgd.factor/{name}": self._factors[name] for name in names}
        return {f"powersgd.error/{name}": error for name, error in zip(names, errors, strict=True)} | factors

    def load_state(self, tensors: Mapping[str, Tensor], *, steps: int) -> None:
        """Go on after ``steps`` steps of the run; ``tensors`` may hold anything else too."""
        self.forget()
        self._steps = steps
        for path, tensor in tensors.items():
            kind, _, name = path.partition("/")
            if kind == "powersgd.error":
                self._errors[name] = tensor
            elif kind == "powersgd.factor":
                self._factors[name] = tensor

    def forget(self) -> None:
        """Begin anew without errors and factors, which NaN would never leave again."""
        self._errors.clear()
        self._factors.clear()

    def _average_factors(self, bucket: dist.GradBucket) -> None:
        """Average in place: ``P`` and ``Q`` of the large matrices, everything else in full.

        A matrix without a gradient on any rank took no part in the step, and DDP will not apply what comes
        out for it: what is owed to it is kept.
        """
        in_full: list[Tensor] = []
        gradients: dict[str, Tensor] = {}
        wanted: dict[str, Tensor] = {}
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            columns = self._columns(gradient)
            if columns is None:
                in_full.append(gradient)
                continue
            name = self._names[parameter]
            gradients[name] = gradient
            wanted[name] = gradient.flatten(1).float() + self._errors.get(name, 0.0)
            if name not in self._factors or self._factors[name].shape[1] != columns:
                self._factors[name] = _random(wanted[name].shape[1], columns).to(gradient.device)
        ps = [m @ self._factors[name] for name, m in wanted.items()]
        used = [gradient.any().float() for gradient in gradients.values()]
        _average([*in_full, *ps, *used])
        ps = [torch.linalg.qr(p).Q for p in ps]
        own = [m.T @ p for m, p in zip(wanted.values(), ps, strict=True)]
        qs = [q.clone() for q in own]
        _average(qs)
        for (name, m), p, q, own_q, share in zip(wanted.items(), ps, qs, own, used, strict=True):
            p = p * (share > 0)
            self._errors[name] = m - p @ own_q.T
            self._factors[name] = q
            gradients[name].copy_((p @ q.T).view_as(gradients[name]))

    def _columns(self, gradient: Tensor) -> int | None:
        """How many columns the factors of a gradient have; None: they would not be half its size."""
        if gradient.ndim < 2:
            return None
        rows, columns = len(gradient), gradient[0].numel()
        rank = min(self._approximation_rank, rows, columns)
        return rank if 2 * rank * (rows + columns) <= rows * columns else None


def _average(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its mean over the ranks, with one collective operation."""
    if not tensors:
        return
    flat = torch.cat([t.flatten() for t in tensors]) / dist.get_world_size()
    dist.all_reduce(flat)
    for tensor, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(mean.view(tensor.shape))


def _random(rows: int, columns: int) -> Tensor:
    """The same on every rank; drawn apart from the generator that dropout uses."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
