"""Staleness metrics of the asynchronous strategies."""

from __future__ import annotations

from collections.abc import Sequence

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
