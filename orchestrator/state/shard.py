"""Optimizer state of which each worker has a part, for updates that are made of whole tensors."""

from __future__ import annotations

from torch import Tensor


class Shard(Tensor):
    """This rank's part of a tensor that has the shape of the whole parameter.

    The type says so, because the shape cannot: the matrix that belongs to the rows of a parameter may have the shape of
    its shard. Copies of a shard are of this type too.
    """
