"""Several optimizers as one, and several schedulers as one, for snapshots of the training state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


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


class JointScheduler:
    """The schedulers of several optimizers."""

    def __init__(self, schedulers: Sequence[LRScheduler]):
        self._schedulers = schedulers

    @property
    def label(self) -> str:
        """The names of their classes, as in ``StepLR+LambdaLR``."""
        return "+".join(type(scheduler).__name__ for scheduler in self._schedulers)

    def step(self) -> None:
        """Step each of them."""
        for scheduler in self._schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        for scheduler, state in zip(self._schedulers, state_dict["schedulers"], strict=True):
            scheduler.load_state_dict(state)


AnyOptimizer = Optimizer | JointOptimizer
AnyScheduler = LRScheduler | JointScheduler


def label_of(value: AnyOptimizer | AnyScheduler) -> str:
    """Return the name of the class that a checkpoint records, and that the one which loads it must have."""
    return value.label if isinstance(value, (JointOptimizer, JointScheduler)) else type(value).__name__
