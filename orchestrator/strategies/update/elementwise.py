"""The optimizers that can update a shard of a tensor alone."""

from __future__ import annotations

from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from orchestrator.compat.torch import changes_step
from orchestrator.job import Job
from orchestrator.strategies.update.job_optimizer import optimizer_of_part

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    SGD,
    Adam,
    AdamW,
    Adagrad,
    Adadelta,
    Adamax,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    ASGD,
)
"""Optimizers that update each element of a tensor by itself, so that the shards of a tensor can be updated alone."""


def elementwise_errors(key: str, job: Job, whole: nn.Module, *, otherwise: str) -> list[str]:
    """Return an error if the optimizer is not known to update each element of a tensor by itself.

    Args:
        key: what divides tensors, as typed on the command line.
        job: makes the optimizer.
        whole: the whole model, which may be of fake tensors.
        otherwise: what to set for any optimizer.

    Raises:
        JobError: the optimizer depends on values that a fake model does not have.
    """
    optimizer = optimizer_of_part(job, whole, nn.Module())
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        return [
            f"{key}: {name} is not known to update each element of a tensor by itself, and each worker has only shards "
            f"of tensors; use {', '.join(kind.__name__ for kind in ELEMENTWISE)}, or {otherwise}"
        ]
    return own_step_errors(key, optimizer, otherwise=otherwise)


def own_step_errors(key: str, optimizer: Optimizer, *, otherwise: str) -> list[str]:
    """Return an error if the job has changed the step of ``optimizer``; the arguments are as above."""
    if not changes_step(optimizer):
        return []
    return [
        f"{key}: job.optimizer gives {type(optimizer).__name__} hooks or a step of its own, which would see only "
        f"shards of tensors; change gradients in Job.loss, or {otherwise}"
    ]
