"""A stage of ``torch.distributed.pipelining`` that notes when it works."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.distributed.pipelining import PipelineStage

from orchestrator.strategies.base import Span


class Clock:
    """The spans of a step, on the device's own clock."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Any, ...]] = []
        self._origin: Any = None
        self._origin_time = 0.0

    def restart(self) -> None:
        """A new step begins."""
        self._marks = []
        self._origin = self._now()
        self._origin_time = time.time()

    @contextlib.contextmanager
    def span(self, kind: Literal["F", "B", "I", "W"], stage: int, microbatch: int) -> Iterator[None]:
        start = self._now()
        yield
        self._marks.append((kind, stage, microbatch, start, self._now()))

    def spans(self) -> tuple[Span, ...]:
        """Those of the step, the first one first. Waits for the device."""
        if self._cuda and self._marks:
            self._marks[-1][-1].synchronize()
        return tuple(
            Span(kind=kind, stage=stage, microbatch=number, start=self._time(start), end=self._time(end))
            for kind, stage, number, start, end in self._marks
        )

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _time(self, mark: Any) -> float:
        since = self._origin.elapsed_time(mark) / 1e3 if self._cuda else mark - self._origin
        return float(self._origin_time + since)


class TimedStage(PipelineStage):
    """``live`` is the largest number of micro-batches whose activations it has held at once."""

    def __init__(self, *args: Any, clock: Clock, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._clock = clock
        self.live = 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._clock.span("F", self.stage_index, fwd_chunk_id):
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.live = max(self.live, len(self.fwd_cache) + len(self.backward_state))
        return out

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._clock.span("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._clock.span("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
