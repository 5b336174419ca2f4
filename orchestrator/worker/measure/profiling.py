"""Traces of some training steps, for Perfetto or ``chrome://tracing``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

SKIPPED_STEPS, PROFILER_WARM_UP_STEPS, PROFILED_STEPS = 5, 2, 10


class StepProfiler(Protocol):
    def step(self) -> None:
        """Mark the end of a training step."""


class NoProfiler:
    """A profiler that records nothing."""

    def step(self) -> None:
        pass


@contextlib.contextmanager
def profile_to(path: Path) -> Iterator[StepProfiler]:
    """Write a trace of ``PROFILED_STEPS`` steps to ``path``, after some steps that warm up."""
    path.parent.mkdir(exist_ok=True)
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(
            wait=SKIPPED_STEPS, warmup=PROFILER_WARM_UP_STEPS, active=PROFILED_STEPS, repeat=1
        ),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        yield profiler
