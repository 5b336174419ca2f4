"""The optimizers that can update a shard of a tensor alone."""

from __future__ import annotations

from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from orchestrator.compat.torch import changes_step

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


def own_step_errors(key: str, optimizer: Optimizer, *, otherwise: str) -> list[str]:
    """Return an error if the job has changed the step of ``optimizer``.

    Args:
        key: what divides tensors, as typed on the command line.
        optimizer: the job's.
        otherwise: what to set for any optimizer.
    """
    if not changes_step(optimizer):
        return []
    return [
        f"{key}: job.optimizer gives {type(optimizer).__name__} hooks or a step of its own, which would see only "
        f"shards of tensors; change gradients in Job.loss, or {otherwise}"
    ]
