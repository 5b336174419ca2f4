"""The optimizers that can update a part of a tensor alone."""

from __future__ import annotations

from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

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
"""Optimizers that update each element of a tensor by itself, so that the parts of a tensor can be updated alone."""


def elementwise_errors(key: str, optimizer: Optimizer, *, otherwise: str) -> list[str]:
    """Return an error if ``optimizer`` is not known to update each element of a tensor by itself.

    Args:
        key: what divides tensors, as typed on the command line.
        optimizer: the optimizer of the job.
        otherwise: what to set for any optimizer.
    """
    if type(optimizer) in ELEMENTWISE:
        return []
    return [
        f"{key}: {type(optimizer).__name__} is not known to update each element of a tensor by itself, and each worker "
        f"has only parts of tensors; use {', '.join(kind.__name__ for kind in ELEMENTWISE)}, or {otherwise}"
    ]
