"""The sums of gradients after the backward passes of a step. Others begin earlier."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.update.gradients import found_anywhere, sum_over


class Sums:
    """Sums after all backward passes. What one rank has a gradient of gets one on all of them.

    Each step calls these methods in this order.

    Attributes:
        averages_over: the number of ranks over which gradients are averaged where a sum is needed.
        remaining: the parameters whose gradients have to be summed over other ranks after :meth:`finish`.
    """

    learns = False
    """Whether the passes of a step change how those of the next one are summed."""

    averages_over = 1
    remaining: Sequence[nn.Parameter] = ()

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        batch: dist.ProcessGroup | None,
        device: torch.device,
        *,
        of_whole: bool = False,
    ):
        """Prepare for the sums of ``parameters`` over the ranks of ``batch``.

        ``of_whole``: whether they are summed before each rank takes its shards of them.
        """
        self.remaining = () if of_whole else parameters
        self._parameters = parameters
        self._batch = batch
        self._device = device

    def restart(self, *, counts: bool) -> None:
        """Measure the next step, if it ``counts``."""

    def begin_step(self, *, passes: int) -> None:
        """Begin a step with so many backward passes through each stage."""

    def around_slice(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for the passes of a slice; ``last``: the last one of the step."""
        return contextlib.nullcontext()

    def passed(self, stage: int) -> None:
        """Take note of a backward pass through a stage."""

    def finish(self, waits: WaitTimer) -> None:
        """Complete the sums, and count what waits for other ranks."""
        if self._batch is None:
            return
        with waits.waiting():
            found = found_anywhere(self._batch, [p.grad is not None for p in self._parameters], self._device)
        for parameter, exists in zip(self._parameters, found, strict=True):
            if exists and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if not self.remaining:
            with waits.waiting():
                sum_over(self._batch, [p.grad for p in self._parameters if p.grad is not None])

    def comm_ms(self) -> float | None:
        """Return how long the last step waited in sums of its backward passes; None if it was not measured."""
        return None

    def close(self) -> None:
        """Release everything that refers to a process group."""
