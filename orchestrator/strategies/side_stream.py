"""Copies of batches to a GPU on a stream of their own, while the stream of the training computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from orchestrator.model.batch import tensors_in, to_device

BeginCopy = Callable[[Any], Callable[[], Any]]
"""Begins to copy a batch; returns a function that returns the copy, for use by what is enqueued from then on."""


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
