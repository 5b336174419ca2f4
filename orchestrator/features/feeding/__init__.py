"""Training data that one process reads for many ranks.

A feeder reads the samples of a run in one order, numbers them, and hands each rank its share of every global batch.
:mod:`.rows` reads a ``ray.data.Dataset``, whose tasks run on the CPUs of the cluster, and :mod:`.streams` a stream of
the user; :mod:`.window` cuts what they give; :mod:`.feed` reads ahead, and begins again at any position;
:mod:`.feeder` is the Ray actor; and :mod:`.client` is what a rank sees: a stream with a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def first_samples(job: Any, split: str, seed: int, count: int = 64) -> Sequence[Any] | str:
    """Return the first samples of a split, from a task on the cluster, or why they are not known."""
    import ray

    from orchestrator.features.feeding.feeder import head_in_task

    if not ray.is_initialized():
        return "of which a sample is needed before the run; use cluster=auto, or strategy=ddp"
    return head_in_task(job, split, seed, count)
