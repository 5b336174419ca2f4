"""The sums of gradients into the parts of a model that is divided."""

from __future__ import annotations

import contextlib

from orchestrator.strategies.group_reduction import Sums
from orchestrator.strategies.measure.device_clock import WaitTimer
from orchestrator.strategies.sharded.divided_model import DividedModel


class PartSums(Sums):
    """Sums over the ranks that have all parts together, in the backward passes, or once after all of a step."""

    def __init__(self, model: DividedModel, *, at_end: bool):
        """``at_end``: whether the sums are made after all backward passes."""
        self._model = model
        self._at_end = at_end
        self.left = model.distinct

    def around_slice(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return self._model.wrapped.around_slice(last=last)

    def finish(self, waits: WaitTimer) -> None:
        if self._at_end:
            with waits.waiting():
                self._model.wrapped.sum_gradients()
        self._model.take_gradients()
