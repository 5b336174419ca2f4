"""The factor of the loss in float16, which keeps small gradients from becoming zero.

Micikevicius et al., ICLR 2018, "Mixed Precision Training", with the constants of ``torch.amp.GradScaler``. That class
decides on each rank by the gradients there whether to update. Here the caller decides, once for all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

INITIAL = 2.0**16
GROWTH_STEPS = 2000
"""The number of updates in a row after which the factor is doubled."""


@dataclass(frozen=True)
class LossScale:
    """The factor, always a power of two, and the number of updates since it last changed."""

    factor: float = INITIAL
    updates: int = 0

    @property
    def can_fall(self) -> bool:
        """Whether a smaller factor may make infinite gradients finite; at 1, they come from the loss itself."""
        return self.factor > 1

    def after(self, *, finite: bool) -> LossScale:
        """Return the scale for the next step, given whether the gradient of this one was finite."""
        if not finite:
            return LossScale(max(1.0, self.factor / 2))
        if self.updates + 1 == GROWTH_STEPS:
            return LossScale(self.factor * 2)
        return LossScale(self.factor, self.updates + 1)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def of_state(cls, state: Mapping[str, Any] | None) -> LossScale:
        """Return the scale that a checkpoint has; the initial one if it is of a run in another precision."""
        return cls() if state is None else cls(**state)
