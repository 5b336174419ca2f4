"""A stage of ``torch.distributed.pipelining`` that notes when it works."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from orchestrator.spans import Kind, Span


class Clock:
    """The spans of a step, on the device's own clock.

    ``first_microbatch`` is added to the numbers that the schedule gives, which begin at 0 in every slice of a step.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Kind, int, int, Any, Any]] = []
        self.first_microbatch = 0

    def restart(self) -> None:
        """A new step begins."""
        self._marks = []

    @contextlib.contextmanager
    def span(self, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        """Time the block. What follows on work of the same kind on the same micro-batch, as the loss does, is part
        of it."""
        microbatch += self.first_microbatch
        start = self._now()
        yield
        if self._marks and self._marks[-1][:3] == (kind, stage, microbatch):
            start = self._marks.pop()[3]
        self._marks.append((kind, stage, microbatch, start, self._now()))

    def spans(self) -> tuple[Span, ...]:
        """Those of the step, the first one first. Waits for the device."""
        now = self._now()
        if self._cuda:
            now.synchronize()
        now_s = time.time()

        def seconds(mark: Any) -> float:
            return float(now_s - mark.elapsed_time(now) / 1e3 if self._cuda else mark)

        return tuple(
            Span(kind=kind, stage=stage, microbatch=number, start=seconds(start), end=seconds(end))
            for kind, stage, number, start, end in self._marks
        )

    def _now(self) -> Any:
        if not self._cuda:
            return time.time()  # the same for all processes of a machine, unlike what is counted from an own origin
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


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
