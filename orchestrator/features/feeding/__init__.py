"""Training data that one process reads for many ranks.

A feeder reads the samples of a run in one order, numbers them, and hands each rank its share of every global batch.
:mod:`.rows` reads a ``ray.data.Dataset``, whose tasks run on the CPUs of the cluster, and :mod:`.streams` a stream of
the user; :mod:`.window` cuts what they give; :mod:`.feed` reads ahead, and begins again at any position;
:mod:`.feeder` is the Ray actor; and :mod:`.client` is what a rank sees: a stream with a position.

Where a process is connected to Ray, it can ask for the first samples and for the number of rows before there is a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def first_samples(job: Any, split: str, seed: int, count: int = 64) -> Sequence[Any] | str:
    """Return the first samples of a split, or why they are not known."""
    from orchestrator.features.feeding.feeder import asked_in_task

    found = asked_in_task(job, "head", split, count, seed=seed, count=count)
    return f"and no sample of it can be read now: {found}" if isinstance(found, str) else list(found)


def length(job: Any, split: str, seed: int, *, up_to: int | None, limit_s: float) -> int | str:
    """Return the number of rows of the first epoch, at most ``up_to``, or why it is not known."""
    from orchestrator.features.feeding.feeder import asked_in_task

    found = asked_in_task(job, "length", split, up_to, limit_s, seed=seed, timeout_s=2 * limit_s + 60)
    return f"has no known length: {found}" if isinstance(found, str) else found
