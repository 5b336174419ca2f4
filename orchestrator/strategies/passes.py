"""How batches pass through what a rank has of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from orchestrator.strategies.measure.job_metrics import BatchMetrics, EvalSums, Measure
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.reduction import Reduction, Weight


class Passes(Protocol):
    """The passes of one rank: ``WholeModel``, or a ``Chain`` of stages."""

    def backward(
        self, slices: Sequence[Any], reduction: Reduction, metrics: BatchMetrics, *, context: Context, factor: float
    ) -> tuple[Tensor, Weight]:
        """Add the gradients of the slices of this rank's share of a batch; see ``WholeModel.backward``."""

    def evaluate(self, batch: tuple[Any, Any], valid: int, measure: Measure) -> EvalSums:
        """Compute loss and metrics of the first ``valid`` samples of a batch."""
