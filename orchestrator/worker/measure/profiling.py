"""Traces of some training steps, for Perfetto or ``chrome://tracing``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

SKIPPED_STEPS, PROFILER_WARM_UP_STEPS, PROFILED_STEPS = 5, 2, 10


@contextlib.contextmanager
def profiled_steps(trace: Path | None) -> Iterator[Callable[[], None]]:
    """Write a trace of ``PROFILED_STEPS`` steps to the file ``trace``, after some steps that warm up; None: write none.

    Yields what is called at the end of each training step.
    """
    if trace is None:
        yield lambda: None
        return
    trace.parent.mkdir(exist_ok=True)
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(
            wait=SKIPPED_STEPS, warmup=PROFILER_WARM_UP_STEPS, active=PROFILED_STEPS, repeat=1
        ),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
    ) as profiler:
        yield profiler.step
