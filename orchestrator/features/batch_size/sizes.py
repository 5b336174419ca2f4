"""The largest batch that fits, by doubling: which size to try next, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RISE = 1.05
"""A larger batch is faster if it has so many times the throughput of the best one before."""
PATIENCE = 2
"""On CPUs, where memory hardly runs out, the search ends after so many sizes in a row that are no faster."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A batch that has been trained with.

    Attributes:
        size: the samples of the global batch.
        per_worker: those of a worker.
        samples_per_s: of all workers.
        memory_mb: the peak memory of the largest worker; None if unknown.
        refused: why the run failed; empty if the batch fits.
    """

    size: int
    per_worker: int
    samples_per_s: float = 0.0
    memory_mb: float | None = None
    refused: str = ""


def next_size(
    trials: Sequence[Trial], *, first: int, least: int, largest: int | None, on_cpu: bool, free_mb: float | None
) -> tuple[int | None, str]:
    """Return the size to try after ``trials``, and if it is None, why the search ends.

    Args:
        first: the size to begin with. It is halved until one fits, and then doubled if the first did.
        least: the smallest size that the layout allows.
        largest: the most samples to try; None for no limit.
        on_cpu: whether the workers share the memory of this host, of which no more than is free may be asked for.
        free_mb: the free memory for each worker beside what it has; None if unknown.
    """
    if not trials:
        return first, ""
    fitting = [trial for trial in trials if not trial.refused]
    last = trials[-1]
    if last.refused:
        if fitting:
            return None, "the next one does not fit"
        return (last.size // 2, "") if last.size // 2 >= least else (None, "no batch fits")
    if len(fitting) < len(trials):
        return None, "twice as many do not fit"
    if largest is not None and 2 * last.size > largest:
        return None, f"--largest {largest}"
    if on_cpu and _no_faster(trials):
        return None, "larger ones are no faster"
    if on_cpu and free_mb is not None and _growth_mb(trials) > free_mb:
        return None, "twice as many may not fit into the memory of this host"
    return 2 * last.size, ""


def fastest(trials: Sequence[Trial]) -> Trial:
    """Return the smallest of the batches that are about as fast as the fastest one."""
    best = max(trial.samples_per_s for trial in trials)
    return next(t for t in sorted(trials, key=lambda t: t.size) if t.samples_per_s * RISE >= best)


def _no_faster(trials: Sequence[Trial]) -> bool:
    if len(trials) <= PATIENCE:
        return False
    before = max(trial.samples_per_s for trial in trials[:-PATIENCE])
    return all(trial.samples_per_s < RISE * before for trial in trials[-PATIENCE:])


def _growth_mb(trials: Sequence[Trial]) -> float:
    """Return how much more memory a worker may take for twice the samples, as far as that is known."""
    known = [trial.memory_mb for trial in trials if trial.memory_mb is not None]
    return max(0.0, 2 * (known[-1] - known[-2])) if len(known) > 1 else 0.0
