"""The ranks that compute the same blocks together, each with a part of their layers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.compat.process_groups import all_gathered, all_reduced, reduce_scattered


class Peers:
    """The ranks that have the parts of the same layers.

    Attributes:
        group: the ranks; None outside of a generation, where nothing is summed.
        inside: whether this rank is computing what differs between them, in a forward or a backward pass. Compiled code
            does not say.
        waiting: returns a context for each sum that is not made by compiled code.
        tokens: the number of those of a sample, where each rank has some of them between the divided layers.
        gathered_logits: whether outputs for all words have been gathered, because something has read them.
    """

    group: dist.ProcessGroup | None = None
    inside = False
    waiting: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    tokens = 0
    gathered_logits = False

    def cross(self, *, inside: bool) -> None:
        """Take note that what follows in a pass differs between the ranks, or does not."""
        if not torch.compiler.is_compiling():
            self.inside = inside

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of ``tensor`` over the ranks."""
        return tensor if self.group is None else self._made(all_reduced, tensor, self.group)

    def gather(self, part: Tensor, count: int, *, axis: int) -> Tensor:
        """Return the parts of all ``count`` ranks, one after another along an axis."""
        if self.group is None:
            return torch.cat([part] * count, dim=axis)
        return self._made(functools.partial(all_gathered, axis=axis), part, self.group)

    def scatter(self, tensor: Tensor, index: int, count: int, *, axis: int) -> Tensor:
        """Return the part number ``index`` of ``count`` equal ones along an axis of the sum over the ranks."""
        if self.group is None:
            return tensor.chunk(count, dim=axis)[index]
        return self._made(functools.partial(reduce_scattered, axis=axis), tensor, self.group)

    def _made(
        self, operation: Callable[[Tensor, dist.ProcessGroup], Tensor], tensor: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        if self.waiting is None or torch.compiler.is_compiling():
            return operation(tensor, group)
        with self.waiting():
            return operation(tensor, group)
