"""How stale the gradients of asynchronous workers are, and which statistics of a model such workers do not share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from orchestrator.compat.torch import BatchNorm
from orchestrator.protocol.metrics import Metric


def staleness_metrics(staleness: Sequence[int]) -> dict[str, Metric]:
    """Return percentiles of the staleness of gradients.

    Args:
        staleness: for each update, the number of other updates since its worker read the parameters.

    Returns:
        ``async/staleness_p50``, ``_p95`` and ``_max``; nothing if there were no updates.
    """
    ordered = sorted(staleness)
    if not ordered:
        return {}
    last = len(ordered) - 1
    return {
        f"async/staleness_{name}": Metric(ordered[min(last, int(share * len(ordered)))], "max")
        for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))
    }


def statistics_notes(model: nn.Module) -> tuple[str, ...]:
    """Return a note if the model has running statistics, which asynchronous workers do not share."""
    if not any(isinstance(module, BatchNorm) for module in model.modules()):
        return ()
    return (
        "BatchNorm: each worker has the running statistics of its own batches, and those of rank 0 are saved; "
        "use GroupNorm or LayerNorm, or a synchronous strategy",
    )
