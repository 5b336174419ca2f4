"""Every use of the internals of ``torchmetrics``, written against torchmetrics 1.9.0. The package is optional."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

CHECKED_VERSION = "1.9.0"

MetricState = Sequence[Mapping[str, Any]]
"""The states of a metric and of those inside of it: tensors and lists, by name."""


def is_metric(value: Any) -> bool:
    """Return whether ``value`` is a ``torchmetrics.Metric``."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, library.Metric)


def keep_local(metric: Any) -> None:
    """Let ``metric`` start no collective operation of its own."""
    for part in _parts(metric):
        part.distributed_available_fn = lambda: False


def state_of(metric: Any) -> MetricState:
    """Return what ``metric`` has been updated to."""
    return [dict(part.metric_state) for part in _parts(metric)]


def set_joined(metric: Any, states: Sequence[MetricState]) -> None:
    """Let ``metric`` have what all ``states`` have together, as its own synchronisation would compute it.

    Unlike ``merge_state``, this serves every metric that can be used with several processes.

    Raises:
        ValueError: a state is a mean, which says nothing of how many samples it stands for.
    """
    for part, found in zip(_parts(metric), zip(*states, strict=True), strict=True):
        for name, reduce in part._reductions.items():
            setattr(part, name, _joined(name, [state[name] for state in found], reduce))
        part._update_count = len(found)


def _joined(name: str, values: Sequence[Any], reduce: Any) -> Any:
    from torchmetrics.utilities import dim_zero_cat, dim_zero_mean

    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if reduce is dim_zero_mean and not all(torch.equal(value, values[0]) for value in values):
        raise ValueError(f"its state {name} is a mean; keep a sum and a count")
    if reduce is dim_zero_cat:
        return dim_zero_cat(list(values))
    stacked = torch.stack(list(values))
    return stacked if reduce is None else reduce(stacked)


def _parts(metric: Any) -> list[Any]:
    return [module for module in metric.modules() if is_metric(module)]
