"""The sums of gradients into the shards of a model whose parameters are gathered."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.sharded.divided_model import DividedModel
from orchestrator.strategies.sums.sums import Sums


class IntoShards(Sums):
    """Sums over the ranks that have all parts together, in the backward passes, or once after all of a step."""

    def __init__(self, model: DividedModel, batch: dist.ProcessGroup, *, at_end: bool):
        """Prepare for the sums.

        Args:
            model: has the parts.
            batch: the ranks that compute the same of the model, of other samples.
            at_end: whether the sums are made after all backward passes.
        """
        self._model = model
        self._replicas = batch
        self._at_end = at_end
        self.remaining = model.distinct

    def around_slice(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return self._model.wrapped.around_slice(last=last)

    def finish(self, waits: WaitTimer) -> None:
        with waits.waiting():
            if self._at_end:
                self._model.wrapped.sum_gradients()
            self._model.take_gradients(self._replicas)
