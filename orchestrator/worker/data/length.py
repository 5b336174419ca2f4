"""Batches of samples of similar length, which need little padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def batches_by_length(
    lengths: Sequence[int] | Tensor, batch_size: int, generator: torch.Generator, *, pool: int = 50
) -> list[list[int]]:
    """Return the batches of an epoch, each of samples of similar length; for ``Job.batch_sampler``.

    The samples are shuffled and cut into pools. Each pool is sorted by length and cut into batches, which are then
    shuffled. What does not fill a batch is left out, in each epoch other samples.

    Args:
        lengths: the length of each sample.
        batch_size: the number of samples in a batch.
        generator: what to draw the order from.
        pool: the number of batches in a pool. More make the lengths in a batch more alike, and fewer the order more
            random.
    """
    of_samples = torch.as_tensor(lengths)
    kept = len(of_samples) // batch_size * batch_size
    order = torch.randperm(len(of_samples), generator=generator)[:kept]
    pools = [part[of_samples[part].argsort(stable=True)] for part in order.split(pool * batch_size)]
    batches = torch.cat(pools).view(-1, batch_size) if pools else order.view(0, batch_size)
    shuffled: list[list[int]] = batches[torch.randperm(len(batches), generator=generator)].tolist()
    return shuffled
