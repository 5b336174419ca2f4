"""Evaluation of the model on this rank's share of the data, and what all ranks have measured together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from orchestrator.config.evaluated import VAL
from orchestrator.config.text import did_you_mean
from orchestrator.protocol.evaluation import evaluation_metrics
from orchestrator.protocol.messages import EvalPoint
from orchestrator.state.transport import gather_json
from orchestrator.strategies.base import Strategy


class MetricError(ValueError):
    """No evaluation reports a metric that the run follows. The text explains it without a traceback."""


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


def metrics_of(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of an evaluation by name, from the points of all ranks as ``gather_json`` returns them."""
    return evaluation_metrics([_point_of(part) for part in parts])


class Follower(Protocol):
    """Goes by what evaluations measure."""

    @property
    def follows(self) -> bool: ...

    def check(self, metrics: Mapping[str, float]) -> None: ...


def check_trial(
    point: EvalPoint,
    followers: Iterable[Follower],
    *,
    world_size: int,
    device: torch.device,
    confirm: Callable[[], None],
) -> None:
    """Check that evaluations measure what ``followers`` follow, unless some split has no weight in the trial.

    A collective operation, if any of them follows something.

    Args:
        point: this rank's part of a trial of an evaluation.
        followers: what is checked.
        world_size: the number of ranks.
        device: of this rank.
        confirm: called before what others have sent is used.
    """
    if not (checked := [follower for follower in followers if follower.follows]):
        return
    parts = gather_json(dataclasses.asdict(point), world_size=world_size, device=device)
    confirm()
    splits = zip(*((part, *part["others"]) for part in parts), strict=True)
    if all(any(part["weight"] for part in of_split) for of_split in splits):
        for follower in checked:
            follower.check(metrics_of(parts))


def value_of(metric: str, metrics: Mapping[str, float], *, key: str) -> float:
    """Return one of the ``metrics`` of an evaluation. Raises MetricError; ``key``: what asks for it."""
    if metric not in metrics:
        raise MetricError(f"{key}: no evaluation reports it; {did_you_mean(metric, metrics)}")
    return metrics[metric]


def _point_of(data: Mapping[str, Any]) -> EvalPoint:
    """Return the point that ``dataclasses.asdict`` and JSON have made plain."""
    ema = None if data["ema"] is None else _point_of(data["ema"])
    return EvalPoint(**{**data, "ema": ema, "others": tuple(map(_point_of, data["others"]))})
