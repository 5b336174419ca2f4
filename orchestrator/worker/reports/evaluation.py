"""Evaluation of the model on this rank's share of the data."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from orchestrator.config.evaluated import VAL
from orchestrator.protocol.messages import EvalPoint
from orchestrator.strategies.base import Strategy


def evaluate(
    strategy: Strategy,
    batches: Iterable[tuple[Any, int]],
    *,
    step: int,
    device: torch.device,
    split: str = VAL,
    perplexity: bool = False,
) -> EvalPoint:
    """Return the sums over this rank's samples of ``split`` after ``step``. The driver adds up the ranks.

    Args:
        batches: pairs of a batch and the number of its valid leading rows, as ``worker.data.EvalBatches`` yields them.
        perplexity: whether to report it.
    """
    loss_sum, weight = torch.zeros((), device=device), torch.zeros(())
    sums: dict[str, torch.Tensor] = {}
    for batch, valid in batches:
        if valid == 0 and not strategy.evaluates_padding:
            continue
        result = strategy.evaluate(batch, valid)
        loss_sum += result.loss_sum
        weight = weight + result.weight  # on a GPU if that is there: reading it would wait for every batch
        for name, value in result.metrics.items():
            sums[name] = sums[name] + value if name in sums else value
    return EvalPoint(
        step=step,
        split=split,
        time=time.time(),
        loss_sum=float(loss_sum),
        weight=float(weight),
        sums={name: float(value) for name, value in sums.items()},
        perplexity=perplexity,
    )
