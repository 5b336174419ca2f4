"""How old the parameters were that gradients were computed with: figures of the asynchronous strategies."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.protocol.metrics import Metric


def staleness_figures(staleness: Sequence[int]) -> dict[str, Metric]:
    """Percentiles; ``staleness`` has for each update how many others were made while its gradient was computed."""
    ordered = sorted(staleness)
    if not ordered:
        return {}
    last = len(ordered) - 1
    return {
        f"async/staleness_{name}": Metric(ordered[min(last, int(share * len(ordered)))], "max")
        for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))
    }
