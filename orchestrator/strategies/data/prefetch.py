"""Batches that are copied to the GPU while the step before computes.

In training, only batches of loader processes are read ahead. Without them, the dataset may draw from the generator of
the GPU, which is seeded for each step, and not for an evaluation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch

from orchestrator.model.batch import tensors_in, to_device

BeginCopy = Callable[[Any], Callable[[], Any]]
"""Begins to copy a batch; returns a function that returns the copy, for use by what is enqueued from then on."""


def prefetched(batches: Generator[Any, None, None], begin_copy: BeginCopy) -> Generator[Any, None, None]:
    """Yield copies of ``batches``. The copy of each has begun when the one before is yielded.

    An error in reading a batch is raised in its turn, after the batch before it.
    """

    def next_copy() -> Callable[[], Any] | None:
        try:
            return begin_copy(next(batches))
        except StopIteration:
            return None
        except Exception as e:
            return _raising(e)

    with contextlib.closing(batches):
        copy = next_copy()
        while copy is not None:
            batch = copy()
            copy = next_copy()
            yield batch
            del batch  # so that no more than two batches are in the memory of the device


class SideStream:
    """Copies batches from pinned memory to a GPU, on a stream of its own. Its calls are a :data:`BeginCopy`."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, batch: Any) -> Callable[[], Any]:
        if any(tensor.layout != torch.strided for tensor in tensors_in(batch)):
            return lambda: to_device(batch, self._device)  # the allocator cannot be told which stream uses them
        with torch.cuda.stream(self._stream):
            copy = to_device(batch, self._device)
        copied = self._stream.record_event()

        def use() -> Any:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            for tensor in tensors_in(copy):
                tensor.record_stream(stream)
            return copy

        return use


def _raising(error: Exception) -> Callable[[], Any]:
    def use() -> Any:
        raise error

    return use
