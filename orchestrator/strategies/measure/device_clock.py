"""Time as the device that computes sees it.

The calls of a step only enqueue work on a GPU, and return before it is done. So marks there are events, which are read
after the step.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch


class DeviceClock(Protocol):
    """Marks points in the work of a device."""

    def mark(self) -> Any:
        """Return a mark behind what has been enqueued. Does not wait."""
        ...

    def ms_between(self, start: Any, end: Any) -> float:
        """Return the milliseconds from one mark to another. Waits until the device has reached both."""
        ...


class _CpuClock:
    def mark(self) -> float:
        return time.perf_counter()

    def ms_between(self, start: float, end: float) -> float:
        return (end - start) * 1e3


class _CudaClock:
    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end))


def clock_of(device: torch.device) -> DeviceClock:
    """Return the clock of ``device``, for the thread and the stream that compute on it."""
    return _CudaClock() if device.type == "cuda" else _CpuClock()


class WaitTimer:
    """Adds up how long a device has to wait in certain blocks: for a batch, or for other ranks.

    A GPU that is still busy with earlier work when the host leaves the block has not waited.
    """

    def __init__(self, device: torch.device, *, counts: bool = True):
        """Prepare for the blocks of ``device``; ``counts``: whether they are counted before the first restart."""
        self._clock = clock_of(device)
        self._blocks: list[tuple[Any, Any]] = []
        self._counts = counts

    def restart(self, *, counts: bool = True) -> None:
        """Forget the blocks so far; ``counts``: whether those that follow are counted, which takes marks."""
        self._blocks, self._counts = [], counts

    def pause(self) -> None:
        """Count no blocks until the next :meth:`restart`."""
        self._counts = False

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block."""
        if not self._counts:
            yield
            return
        start = self._clock.mark()
        yield
        self._blocks.append((start, self._clock.mark()))

    def total_ms(self) -> float:
        """Return the milliseconds of all blocks since the last restart. Waits for the device, so not within a step."""
        return math.fsum(self._clock.ms_between(start, end) for start, end in self._blocks)
