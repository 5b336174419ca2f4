"""The metrics that a job computes itself: called, checked, and summed over the parts of a batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from orchestrator.compat.generators import kept_generators
from orchestrator.job import Job
from orchestrator.model.batch import has_row_per_sample, map_tensors, num_rows, rows_between, tensors_in
from orchestrator.model.precision import summable
from orchestrator.user_code.errors import JobError
from orchestrator.user_code.results import kind_of

_TRAIN = re.compile(r"loss|epoch|lr|lr_group_\d+|grad_norm|loss_scale|samples_seen")
_EVALUATION = re.compile(r"loss|ema_.*")
_RESERVED = {
    "metrics": _EVALUATION,
    "metric_objects": _EVALUATION,
    "train_metrics": _TRAIN,
    "training_step": _TRAIN,
}
"""The names of the run's own metrics, by the method of the job."""

RTOL = 1e-3
"""The relative difference of two sums over the same samples that rounding explains, also in bfloat16."""
MOST_LOOKED_AT = 10
"""The number of batches in which a metric that is 0 is looked at again: zeros are sums of zeros."""

Measure = Callable[[Any, Any], Mapping[str, Tensor]]
"""Returns the metrics of an output and its target."""


@dataclass(frozen=True, kw_only=True)
class EvalSums:
    """Sums over the valid samples of a batch, as scalar tensors: of weighted loss, of weight, and of each metric."""

    loss_sum: Tensor
    weight: Tensor
    metrics: Mapping[str, Tensor]


@torch.no_grad()
def train_metrics(job: Job, output: Any, target: Any) -> dict[str, Tensor]:
    """Return the job's metrics of a training batch, or of a part of it, as sums.

    Args:
        output: the output from which the loss was computed. The job receives it without its graph.
        target: the target of the same samples.

    Raises:
        JobError: see :func:`checked_metrics`.
    """
    return checked_metrics(job.train_metrics(map_tensors(Tensor.detach, output), target), "train_metrics")


def evaluation_metrics(job: Job, output: Any, target: Any) -> dict[str, Tensor]:
    """Return the job's metrics of an evaluation batch, or of a part of it, as sums.

    Raises:
        JobError: see :func:`checked_metrics`.
    """
    return checked_metrics(job.metrics(output, target), "metrics")


class SumCheck:
    """Measures, and looks in the first batches whether the metrics are sums over samples, as an F1 score is none.

    Args:
        method: the name of the job's method.
        measure: returns its metrics for an output and a target.
        batches: in how many batches to look.

    Attributes:
        warning: what the user should know; None if nothing was found.
    """

    def __init__(self, method: str, measure: Measure, *, batches: int = MOST_LOOKED_AT):
        self.warning: str | None = None
        self._method = method
        self._measure = measure
        self._batches = batches

    def __call__(self, output: Any, target: Any) -> Mapping[str, Tensor]:
        """Return the metrics of a batch, or of a part of it."""
        values = self._measure(output, target)
        if values and self._batches:
            self._look(output, target, values)
        return values

    def _look(self, output: Any, target: Any, values: Mapping[str, Tensor]) -> None:
        rows = num_rows(target) or 0
        if rows < 2 or not has_row_per_sample(output, rows):
            return
        try:
            with kept_generators(next(iter(tensors_in(output))).device):
                halves = [
                    self._measure(rows_between(output, start, stop), rows_between(target, start, stop))
                    for start, stop in ((0, rows // 2), (rows // 2, rows))
                ]
            parts = {name: (float(values[name]), *(float(half[name]) for half in halves)) for name in values}
        except Exception:  # the job may need whole batches
            self._batches = 0
            return
        self._batches = self._batches - 1 if any(whole == 0 for whole, *_ in parts.values()) else 0
        for name, (whole, first, second) in parts.items():
            if abs(whole - first - second) > RTOL * (abs(whole) + abs(first) + abs(second)):
                self._batches = 0
                self.warning = (
                    f"job.{self._method}: {name!r} is not a sum over the samples, as it is {whole:.6g} for {rows} of "
                    f"them and {first:.6g} and {second:.6g} for their halves, so what is logged, the sum over all "
                    "batches divided by the weight, means nothing: return sums, such as the number of correct samples, "
                    "or use Job.metric_objects"
                )
                return


class BatchMetrics:
    """The sums of the job's metrics over the parts of a training batch; without ``measure``, of none."""

    def __init__(self, measure: Measure | None = None):
        self.sums: dict[str, Tensor] = {}
        self._measure = measure

    def of(self, output: Any, target: Any) -> Mapping[str, Tensor]:
        """Return the metrics of a part of the batch."""
        return {} if self._measure is None else self._measure(output, target)

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add the metrics of a part of the batch."""
        add_metrics(self.sums, values)


def checked_metrics(values: Any, method: Literal["metrics", "train_metrics", "training_step"]) -> dict[str, Tensor]:
    """Return what the job's ``method`` returned, as scalar tensors by name.

    Raises:
        JobError: a name cannot be used or a value is not a scalar; the text says which.
    """
    where = f"job.{method}"
    if not isinstance(values, Mapping):
        raise JobError(f"{where} returned {kind_of(values)}; return a dict of scalar tensors by name")
    kind = "a mean over the batch" if method == "training_step" else "a sum over the batch"
    return {checked_name(n, method): _scalar(v, n, where, kind) for n, v in values.items()}


def add_metrics(sums: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Add ``values`` to ``sums`` by name, on the devices of the sums."""
    for name, value in values.items():
        sums[name] = sums[name] + value.to(sums[name].device) if name in sums else value


def loss_reads(job: Job, output: Any, target: Any, which: Callable[[Tensor], bool]) -> bool:
    """Return whether the loss depends on the floating-point tensors of an output for which ``which`` is true."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point() and which(tensor))

    with torch.enable_grad():
        return job.loss(map_tensors(leaf, output), target).requires_grad


def loss_of(job: Job, output: Any, target: Any, *, scalar: bool = True) -> Tensor:
    """Return the mean loss of a batch; if not ``scalar``, it may be several means.

    Raises:
        JobError: it is not a scalar, or has no gradient in training.
    """
    try:
        loss = job.loss(output, target)
    except Exception as e:
        if output is None:
            raise JobError("the output of the model is None; return it from forward()") from e
        raise
    if scalar and loss.numel() != 1:
        raise JobError(f"job.loss returns {kind_of(loss)}; return the mean over the batch, a scalar tensor")
    if torch.is_grad_enabled() and not loss.requires_grad and any(t.requires_grad for t in tensors_in(output)):
        raise JobError(
            "job.loss returns a tensor without a gradient; compute it from the output without detach(), item() or "
            "torch.no_grad()"
        )
    return loss


def is_scalar(tensor: Tensor) -> bool:
    """Return whether a tensor of an output is a number that no sample has for itself, such as a loss."""
    return tensor.ndim == 0


def checked_name(name: Any, method: str) -> str:
    """Return the name of a metric that the job's ``method`` gives.

    Raises:
        JobError: it cannot be used; the text says why.
    """
    where = f"job.{method}"
    if not isinstance(name, str):
        raise JobError(f"{where}: the name {name!r} is a {type(name).__name__}; name metrics by strings")
    if _RESERVED[method].fullmatch(name):
        raise JobError(f"{where}: the run itself logs a metric named {name!r}; choose another name")
    if not (name and name.isprintable()):
        raise JobError(f"{where}: {name!r} cannot be the name of a metric; give it one without control characters")
    return name


def _scalar(value: Any, name: str, where: str, wanted: str) -> Tensor:
    if isinstance(value, (bool, int, float)):
        value = torch.as_tensor(float(value))
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        raise JobError(f"{where}: {name!r} is {kind_of(value)}; return a scalar tensor of real numbers, {wanted}")
    return summable(value.reshape(()))
