"""Several optimizers as one, for snapshots of the training state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from orchestrator.state.schedule import Schedule


class JointOptimizer:
    """The parameter groups and the state of several ``optimizers``, which have no parameter in common."""

    def __init__(self, optimizers: Sequence[Optimizer]):
        self.optimizers = optimizers

    @property
    def label(self) -> str:
        """The names of their classes, as in ``Adam+SGD``."""
        return "+".join(type(optimizer).__name__ for optimizer in self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the first optimizer, then of the next."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of each parameter."""
        return {parameter: values for optimizer in self.optimizers for parameter, values in optimizer.state.items()}


AnyOptimizer = Optimizer | JointOptimizer
AnyScheduler = LRScheduler | Schedule


def label_of(value: AnyOptimizer | AnyScheduler) -> str:
    """Return the name of the class that a checkpoint records, and that the one which loads it must have."""
    return value.label if isinstance(value, (JointOptimizer, Schedule)) else type(value).__name__
