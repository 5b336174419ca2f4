"""What a run with ``train.lr_range`` has found: the learning rate at which the loss falls fastest, and a picture.

This is the range test of Smith (2015, arXiv:1506.01186), in one sweep of exponentially rising rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.protocol.core_metrics import LOSS

LR = "train/lr"
DIVERGED = 4
"""A loss has diverged when it is so many times the least one before it."""
LEAST_POINTS = 10
_SMOOTHED = 20
"""A loss is smoothed over this part of all points to either side."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The losses up to where they diverge.

    Attributes:
        rates: the learning rates of the updates.
        losses: the loss that each was made with.
        smoothed: the same, as running means.
        suggested: the rate at which the smoothed loss falls fastest; None if it never falls.
    """

    rates: Sequence[float]
    losses: Sequence[float]
    smoothed: Sequence[float]
    suggested: float | None


def find(points: Iterable[tuple[int, float, Mapping[str, float]]]) -> Found | None:
    """Return what the logged ``points``, each with its step and its time, show; None if they are too few."""
    rates, losses = [], []
    before: float | None = None
    for _, _, metrics in points:
        loss = metrics.get(LOSS.name)
        if before is not None and loss is not None and math.isfinite(loss):
            rates.append(before)
            losses.append(loss)
        before = metrics.get(LR, before)  # of the next update
    smoothed = running_means(losses)
    kept = next((i for i, loss in enumerate(smoothed) if loss > DIVERGED * min(smoothed[: i + 1])), len(smoothed))
    rates, losses, smoothed = rates[:kept], losses[:kept], smoothed[:kept]
    if len(rates) < LEAST_POINTS:
        return None
    falls = [(smoothed[i - 1] - smoothed[i + 1], i) for i in range(1, len(smoothed) - 1)]
    fall, place = max(falls)
    return Found(rates=rates, losses=losses, smoothed=smoothed, suggested=rates[place] if fall > 0 else None)


def running_means(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and its neighbours, as many on either side, so that no place is moved."""
    widest = max(1, len(values) // _SMOOTHED)
    means = []
    for i in range(len(values)):
        width = min(widest, i, len(values) - 1 - i)
        window = values[i - width : i + width + 1]
        means.append(sum(window) / len(window))
    return means


def draw(found: Found, path: Path) -> None:
    """Draw the losses by the rates.

    Raises:
        OSError: ``path`` cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(found.rates, found.losses, color="#bbbbbb", label="loss of a step")
    axes.plot(found.rates, found.smoothed, color="#1f77b4", label="smoothed")
    if found.suggested is not None:
        axes.axvline(found.suggested, color="#d62728", linestyle="--", label=f"falls fastest at {found.suggested:.1e}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="training loss", title="Loss by learning rate")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
