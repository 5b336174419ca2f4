"""What the order of a schedule's actions implies."""

from collections import Counter
from collections.abc import Iterable

from orchestrator.timeline import Action


def live_microbatches(order: Iterable[Action]) -> dict[int, int]:
    """Return, by stage, the peak number of micro-batches whose activations it holds: from F until B, or until W."""
    live: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for kind, stage, _ in order:
        live[stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
        most[stage] = max(most[stage], live[stage])
    return dict(most)
