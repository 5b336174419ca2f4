"""The metrics that a job computes itself: called, checked, and summed over the parts of a batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from orchestrator.job import Job
from orchestrator.model.batch import map_tensors, tensors_in
from orchestrator.model.precision import summable
from orchestrator.user_code.errors import JobError
from orchestrator.user_code.results import kind_of

_TRAIN = re.compile(r"loss|epoch|lr|lr_group_\d+|grad_norm|loss_scale|samples_seen")
_RESERVED = {"metrics": re.compile(r"loss|ema_.*"), "train_metrics": _TRAIN, "training_step": _TRAIN}
"""The names of the run's own metrics, by the method of the job."""


@torch.no_grad()
def train_metrics(job: Job, output: Any, target: Any) -> dict[str, Tensor]:
    """Return the job's metrics of a training batch, or of a part of it, as sums.

    Args:
        job: the job.
        output: the output from which the loss was computed. The job receives it without its graph.
        target: the target of the same samples.

    Raises:
        JobError: see :func:`checked_metrics`.
    """
    return checked_metrics(job.train_metrics(map_tensors(Tensor.detach, output), target), "train_metrics")


class BatchMetrics:
    """The sums of the job's metrics over the parts of a training batch; nothing is measured unless ``wanted``."""

    def __init__(self, job: Job, *, wanted: bool):
        self.sums: dict[str, Tensor] = {}
        self._job = job if wanted and type(job).train_metrics is not Job.train_metrics else None

    def of(self, output: Any, target: Any) -> Mapping[str, Tensor]:
        """Return the metrics of a part of the batch."""
        return {} if self._job is None else train_metrics(self._job, output, target)

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
        raise JobError([f"{where} returned {kind_of(values)}; return a dict of scalar tensors by name"])
    kind = "a mean over the batch" if method == "training_step" else "a sum over the batch"
    return {_checked_name(n, where, _RESERVED[method]): _scalar(v, n, where, kind) for n, v in values.items()}


def add_metrics(sums: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Add ``values`` to ``sums`` by name, on the devices of the sums."""
    for name, value in values.items():
        sums[name] = sums[name] + value.to(sums[name].device) if name in sums else value


def loss_reads(job: Job, output: Any, target: Any, which: Callable[[Tensor], bool]) -> bool:
    """Return whether the loss depends on those floating-point tensors of an output for which ``which`` is true."""

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
            raise JobError(["the output of the model is None; return it from forward()"]) from e
        raise
    if scalar and loss.numel() != 1:
        raise JobError([f"job.loss returns {kind_of(loss)}; return the mean over the batch, a scalar tensor"])
    if torch.is_grad_enabled() and not loss.requires_grad and any(t.requires_grad for t in tensors_in(output)):
        raise JobError(
            [
                "job.loss returns a tensor without a gradient; compute it from the output without detach(), item() or "
                "torch.no_grad()"
            ]
        )
    return loss


def is_scalar(tensor: Tensor) -> bool:
    """Return whether a tensor of an output is a number that no sample has for itself, such as a loss."""
    return tensor.ndim == 0


def _checked_name(name: Any, where: str, reserved: re.Pattern[str]) -> str:
    if not isinstance(name, str):
        raise JobError([f"{where}: the name {name!r} is a {type(name).__name__}; name metrics by strings"])
    if reserved.fullmatch(name):
        raise JobError([f"{where}: the run itself logs a metric named {name!r}; choose another name"])
    if not (name and name.isprintable()):
        raise JobError([f"{where}: {name!r} cannot be the name of a metric; give it one without control characters"])
    return name


def _scalar(value: Any, name: str, where: str, wanted: str) -> Tensor:
    if isinstance(value, (bool, int, float)):
        value = torch.as_tensor(float(value))
    if not isinstance(value, Tensor):
        raise JobError([f"{where}: {name!r} is a {type(value).__name__}; return a scalar tensor, {wanted}"])
    if value.numel() != 1 or value.is_complex():
        kind = f"a tensor of shape {tuple(value.shape)}" if value.numel() != 1 else "a complex number"
        raise JobError([f"{where}: {name!r} is {kind}; return a scalar tensor, {wanted}"])
    return summable(value.reshape(()))
