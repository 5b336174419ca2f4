"""Measuring on a worker: step times, the figures of a logged point, readings of the node.

Device work is waited for at the edges of a logging window only.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from orchestrator.protocol.messages import TrainPoint
from orchestrator.protocol.metrics import Metric
from orchestrator.timeline.spans import Span

WARM_UP_STEPS = 10
"""Steps left out of every throughput figure, or a fifth of a short run."""


class NonFiniteError(ArithmeticError):
    """``what`` became NaN or infinite at ``step``, which may be some steps ago; ``advice`` says what to do."""

    advice = (
        "lower the learning rate, clip with train.clip_norm=1.0, or leave such steps out with train.on_nonfinite=skip"
    )

    def __init__(self, what: str, step: int):
        super().__init__(what, step)
        self.what = what
        self.step = step

    def __str__(self) -> str:
        return f"{self.what} at step {self.step}; {self.advice}"


class StepTimer:
    """Time from the end of one step to the end of the next, on the device's own clock."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """The end of a step (or, first, the start)."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def restart(self) -> None:
        """Leave out the time since the last mark: evaluation, a checkpoint."""
        if self._marks:
            self._marks.append(None)
        self.mark()

    def drain(self) -> list[float]:
        """Milliseconds of each step since the last call; the last mark starts the next window."""
        marks, self._marks = self._marks, self._marks[-1:]
        if self._cuda and marks and marks[-1] is not None:
            marks[-1].synchronize()
        pairs = itertools.pairwise(marks)
        return [self._between(a, b) for a, b in pairs if a is not None and b is not None]

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) if self._cuda else (end - start) * 1e3


class Window:
    """What happened since the last logged point, kept on the device until it is asked for."""

    def __init__(self, *, device: torch.device, total_steps: int, first_step: int):
        self.timer = StepTimer(device)
        self._device = device
        self.data_wait_s = 0.0
        self._warm_at = first_step + min(WARM_UP_STEPS, total_steps // 5)
        self._losses: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._steps: list[int] = []
        self._updated: list[int] = []  # the steps among them that were not skipped

    def add(self, step: int, loss_sum: Tensor, weight: Tensor, *, skipped: bool) -> None:
        self.timer.mark()
        self._steps.append(step)
        if not skipped:
            self._updated.append(step)
            self._losses.append(loss_sum)
            self._weights.append(weight)

    def check_finite(self) -> None:
        """Wait for the device and look at every loss of the window.

        Raises:
            NonFiniteError: naming the first step.
        """
        if self._losses and not bool(torch.isfinite(torch.stack(self._losses)).all()):
            losses = zip(self._updated, torch.stack(self._losses).tolist(), strict=True)
            step, loss = next((s, v) for s, v in losses if not math.isfinite(v))
            raise NonFiniteError(f"the loss became {loss}", step)

    def close(
        self,
        *,
        samples_seen: int,
        epoch: float,
        lr: float,
        grad_norm: Tensor | None,
        comm_ms: float | None,
        spans: Sequence[Span],
        metrics: Mapping[str, Metric],
    ) -> TrainPoint:
        """The window as a point; the next window starts. ``comm_ms`` and ``spans`` are the last step's.

        Raises:
            NonFiniteError: the loss or the gradient is not finite.
        """
        self.check_finite()
        step, steps = self._steps[-1], len(self._steps)
        norm = None if grad_norm is None else float(grad_norm)
        if norm is not None and not math.isfinite(norm) and self._losses:
            raise NonFiniteError(f"the gradient norm became {norm}", step)
        times = self.timer.drain()
        comm_share = None if comm_ms is None else min(1.0, comm_ms / times[-1])  # two clocks may differ a little
        warm = [t for s, t in zip(self._steps[-len(times) :], times, strict=False) if self._warm(s)]
        point = TrainPoint(
            step=step,
            time=time.time(),
            samples_seen=samples_seen,
            epoch=epoch,
            loss_sum=float(torch.stack(self._losses).sum()) if self._losses else 0.0,
            weight=float(torch.stack(self._weights).sum()) if self._weights else 0.0,
            lr=lr,
            grad_norm=norm,
            step_ms=tuple(warm),
            data_wait_ms=self.data_wait_s * 1e3 / steps,
            comm_share=comm_share,
            peak_memory_mb=peak_memory_mb(self._device),
            spans=tuple(spans) if self._warm(step) else (),
            metrics=metrics,
        )
        self._losses, self._weights, self._steps, self._updated = [], [], [], []
        self.data_wait_s = 0.0
        return point

    def _warm(self, step: int) -> bool:
        return step > self._warm_at


class CpuMeter:
    """How busy the node's CPUs were since the last reading.

    ``psutil.cpu_percent`` remembers its last reading for each thread apart, and Ray answers from several.
    """

    def __init__(self) -> None:
        self._busy_s, self._total_s = _cpu_seconds()

    def percent(self) -> float | None:
        """0 to 100 over all CPUs; None where the kernel's clock has not moved on."""
        busy_s, total_s = self._busy_s, self._total_s
        self._busy_s, self._total_s = _cpu_seconds()
        if self._total_s <= total_s:
            return None
        return min(100.0, max(0.0, 100 * (self._busy_s - busy_s) / (self._total_s - total_s)))


def _cpu_seconds() -> tuple[float, float]:
    """Busy and all CPU time since boot; Linux counts the time of guests among the user's as well."""
    times = psutil.cpu_times()._asdict()
    total_s = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
    return total_s - times["idle"] - times.get("iowait", 0.0), total_s


def peak_memory_mb(device: torch.device) -> float | None:
    """The most memory that torch has had on the GPU, or else this process in RAM; None where the kernel keeps no count.

    Linux keeps another one (``getrusage``), in which the process that this one was forked from has a part.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    status = Path("/proc/self/status").read_text()
    peak = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return None if peak is None else int(peak) * 1024 / 1e6


def system_metrics(device: torch.device, cpu: CpuMeter) -> dict[str, float]:
    """Readings of this node, under MLflow's names without the ``system/<node>/`` in front."""
    memory = psutil.virtual_memory()
    readings = {
        "system_memory_usage_megabytes": memory.used / 1e6,
        "system_memory_usage_percentage": memory.percent,
    }
    if (percent := cpu.percent()) is not None:
        readings["cpu_utilization_percentage"] = percent
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        readings["gpu_0_memory_usage_megabytes"] = (total - free) / 1e6
        readings["gpu_0_memory_usage_percentage"] = 100 * (total - free) / total
    return readings
