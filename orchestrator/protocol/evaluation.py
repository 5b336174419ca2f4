"""The metrics of an evaluation, from the sums of all ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from orchestrator.config.evaluated import VAL, metric_prefix
from orchestrator.protocol.messages import EvalPoint
from orchestrator.protocol.metrics import MetricSpec, Summary

_OF_EVERY_SPLIT = ("loss", "accuracy", "perplexity", "ema_loss")
_LARGEST_EXPONENT = 700.0
"""``math.exp`` raises an error for larger ones than 709."""


def evaluation_metrics(parts: Sequence[EvalPoint]) -> dict[str, float]:
    """Return the metrics of an evaluation by name; ``parts`` are the points of all ranks."""
    metrics = _metrics_of_split(parts, metric_prefix(parts[0].split))
    for others in zip(*(part.others for part in parts), strict=True):
        metrics |= evaluation_metrics(others)
    return metrics


def evaluation_specs(part: EvalPoint) -> list[MetricSpec]:
    """Return the specs of the metrics of an evaluation that no module declares: of splits other than ``val``."""
    splits = [split for point in (part, *part.others) if (split := point.split) != VAL]
    names = [f"{metric_prefix(split)}{metric}" for split in splits for metric in _OF_EVERY_SPLIT]
    return [_spec(name, name.replace("/", "_")) for name in names]


def sums_by_weight(prefix: str, parts: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Return the job's metrics, from the sums and the weight of each rank; empty if there is no weight."""
    weight = math.fsum(weight for _, weight in parts)
    if weight == 0:
        return {}
    names = sorted({name for sums, _ in parts for name in sums})
    return {f"{prefix}{name}": math.fsum(sums.get(name, 0.0) for sums, _ in parts) / weight for name in names}


def _metrics_of_split(parts: Sequence[EvalPoint], prefix: str) -> dict[str, float]:
    weight = math.fsum(p.weight for p in parts)
    if weight == 0:
        return {}
    metrics = sums_by_weight(prefix, [(p.sums, p.weight) for p in parts])
    loss = math.fsum(p.loss_sum for p in parts) / weight
    if parts[0].perplexity:
        metrics[f"{prefix}perplexity"] = math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf
    values = {f"{prefix}{name}": value for p in parts for name, value in (p.values or {}).items()}
    metrics = {f"{prefix}loss": loss, **metrics, **values}
    averaged = [p.ema for p in parts if p.ema is not None]
    return {**metrics, **_metrics_of_split(averaged, f"{prefix}ema_")} if averaged else metrics


def _spec(name: str, key: str) -> MetricSpec:
    return MetricSpec(name=name, progress=f"{key} {{}}", summaries=(Summary(key=key),))
