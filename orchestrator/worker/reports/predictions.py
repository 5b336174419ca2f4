"""Predictions that the job makes with the whole model, such as by generation, for its metric objects."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.job import Job
from orchestrator.strategies.base import Strategy
from orchestrator.worker.reports.job_calls import call_without_effect


def predict(
    strategy: Strategy,
    split: str,
    update: Callable[[Any, Any], None],
    *,
    device: torch.device,
    most: int | None,
    progress: Callable[[], None],
) -> None:
    """Let the job predict this rank's share of a ``split``. All ranks call this at the same step.

    Args:
        update: receives each prediction and its target.
        device: of this rank.
        most: the number of predictions; None for all.
        progress: called after each of them.

    Raises:
        ModelChangedError: the job has changed the model.
        Exception: whatever the job raises.
    """
    job, model = strategy.job, strategy.own_model
    part, parts = strategy.context.dp_rank, strategy.context.mesh.data_parallel_size
    if strategy.divides_model:
        weights = strategy.gather_model()
        strategy.confirm()
        if weights is not None:
            model, part, parts = rebuilt(job, weights), 0, 1
    if model is None:
        return
    whole: nn.Module = model

    def predicted() -> None:
        whole.eval()
        for output, target in itertools.islice(job.predictions(whole, split, part, parts), most):
            update(output, target)
            progress()

    call_without_effect(predicted, method="predictions", model=whole, device=device)


def rebuilt(job: Job, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return the job's model on the CPU with these ``weights``."""
    model = job.model()
    model.load_state_dict(weights)
    return model
