"""Measurements on a worker: step times, the metrics of a logged point, system metrics, compilation, traces of steps.

The host waits for the device only at the edges of a logging window. A metric of the training loop is declared and
measured here; it needs no other change.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchestrator.compat.torch import watching_compilation
from orchestrator.protocol.core_metrics import EPOCH, SAMPLES_SEEN
from orchestrator.protocol.messages import TrainPoint
from orchestrator.protocol.metrics import Metric, MetricSpec, measured
from orchestrator.strategies.measure.device import WaitTimer, clock_of
from orchestrator.timeline import Span
from orchestrator.worker.control.control import Outbox
from orchestrator.worker.measure.flops import StepFlops
from orchestrator.worker.measure.meters import GpuSharing, MachineMeter
from orchestrator.worker.process.process_memory import peak_bytes

WARM_UP_STEPS = 10
"""Steps that no throughput metric includes; in a short run, a fifth of its steps."""

LR = MetricSpec(name="train/lr")
GRAD_NORM = MetricSpec(name="train/grad_norm")


def lr_of_groups(lrs: Sequence[float]) -> dict[str, Metric]:
    """Return ``train/lr_group_<i>`` for each parameter group; empty if all groups have the same learning rate."""
    if len(set(lrs)) < 2:
        return {}
    return measured({MetricSpec(name=f"{LR.name}_group_{i}"): lr for i, lr in enumerate(lrs)})


class NonFiniteError(ArithmeticError):
    """``what`` became NaN or infinite at ``step``, possibly some steps ago; ``advice`` tells the user what to do."""

    advice = (
        "lower the learning rate, clip with train.clip_norm=1.0, or leave such steps out with train.on_nonfinite=skip; "
        "train.detect_anomaly=true names the line that it comes from"
    )

    def __init__(self, what: str, step: int):
        super().__init__(what, step)
        self.what = what
        self.step = step

    def __str__(self) -> str:
        return f"{self.what} at step {self.step}; {self.advice}"


class NoUpdateError(ArithmeticError):
    """No step of a run has made an update. The keys are those of ``train``, which say when a step makes none."""

    def __init__(self, *, on_nonfinite: str, precision: str):
        found = "no step has made an update, because no gradient was finite"
        if on_nonfinite == "skip":
            text = (
                f"train.on_nonfinite=skip: {found}; check the loss and the data, or set train.on_nonfinite=stop, which "
                "names the first step whose loss is not"
            )
        else:
            text = (
                f"train.precision={precision}: {found} while the loss scale fell; train for more steps, or set "
                "train.precision=bf16 or fp32"
            )
        super().__init__(text)


class StepTimer:
    """Measures the time from the end of one step to the end of the next."""

    def __init__(self, device: torch.device):
        self._clock = clock_of(device)
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the end of a step, or, at the first call, the start."""
        self._marks.append(self._clock.mark())

    def restart(self) -> None:
        """Exclude the time since the last mark, for example an evaluation or a checkpoint."""
        if self._marks:
            self._marks.append(None)
        self.mark()

    def drain(self) -> list[float]:
        """Return the milliseconds of each step since the last call; the last mark starts the next window."""
        marks, self._marks = self._marks, self._marks[-1:]
        pairs = itertools.pairwise(marks)
        return [self._clock.ms_between(a, b) for a, b in pairs if a is not None and b is not None]


class Window:
    """The steps since the last logged point; their losses stay on the device until the window closes."""

    def __init__(self, *, device: torch.device, total_steps: int, first_step: int):
        self.timer = StepTimer(device)
        self.data_wait = WaitTimer(device)
        self._machine = _machine_meter(device)
        self._last_step = first_step + total_steps
        self._device = device
        self._warm_at = first_step + min(WARM_UP_STEPS, total_steps // 5)
        self._losses: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._steps: list[int] = []
        self._step_weight: Tensor | float = 0.0
        self._updated: list[int] = []  # which of _steps were not skipped
        self._slowed: list[int] = []  # in which of _steps the model was compiled, or its FLOPs counted

    def add(self, step: int, loss_sum: Tensor, weight: Tensor, *, skipped: bool, slowed: bool = False) -> None:
        """Add a completed step.

        Args:
            loss_sum: this rank's summed loss, a scalar.
            weight: this rank's weight, a scalar.
            skipped: whether it made no update.
            slowed: whether the model was compiled in it, or slowly counted; then no throughput metric includes it.
        """
        self.timer.mark()
        self._steps.append(step)
        self._step_weight = weight
        if slowed:
            self._slowed.append(step)
        if not skipped:
            self._updated.append(step)
            self._losses.append(loss_sum)
            self._weights.append(weight)

    def check_finite(self) -> None:
        """Wait for the device and check every loss of the window.

        Raises:
            NonFiniteError: a loss is not finite; the error has its step, the first such one.
        """
        if self._losses and not bool(torch.isfinite(torch.stack(self._losses)).all()):
            losses = zip(self._updated, torch.stack(self._losses).tolist(), strict=True)
            step, loss = next((s, v) for s, v in losses if not math.isfinite(v))
            raise NonFiniteError(f"the loss became {loss}", step)

    def close(
        self,
        *,
        samples_seen: int,
        epoch: float | None,
        lr: float,
        grad_norm: Tensor | None,
        sums: Mapping[str, Tensor],
        comm_ms: float | None,
        spans: Sequence[Span],
        metrics: Mapping[str, Metric],
        flops: StepFlops | None = None,
    ) -> TrainPoint:
        """Return the window as a point and start the next window.

        Args:
            samples_seen: samples that the whole run has trained on.
            epoch: passes over the training set, a fraction within one; None if its length is unknown.
            lr: the learning rate of the next step.
            grad_norm: the norm of the whole gradient of the last step (a scalar); None if it was not computed.
            sums: the job's metrics of the last step, summed over this rank's samples (scalars).
            comm_ms: how long the last step waited for other ranks; None if unknown.
            spans: what the stages of this rank did in the last step.
            flops: the work of a step; None if unknown.

        Raises:
            NonFiniteError: the loss or the gradient is not finite.
        """
        self.check_finite()
        step, steps = self._steps[-1], len(self._steps)
        norm = None if grad_norm is None else float(grad_norm)
        if norm is not None and not math.isfinite(norm) and step in self._updated:
            raise NonFiniteError(f"the gradient norm became {norm}", step)
        own = {SAMPLES_SEEN: samples_seen, EPOCH: epoch, LR: lr, GRAD_NORM: norm}
        times = self.timer.drain()
        comm_share = None if comm_ms is None else min(1.0, comm_ms / times[-1])  # the two clocks differ slightly
        warm = [t for s, t in zip(self._steps[-len(times) :], times, strict=False) if self._warm(s)]
        point = TrainPoint(
            step=step,
            time=time.time(),
            loss_sum=float(torch.stack(self._losses).sum()) if self._losses else 0.0,
            weight=float(torch.stack(self._weights).sum()) if self._weights else 0.0,
            step_ms=tuple(warm),
            data_wait_ms=self.data_wait.total_ms() / steps,
            comm_share=comm_share,
            peak_memory_mb=peak_memory_mb(self._device),
            spans=tuple(spans) if self._warm(step) else (),
            step_weight=float(self._step_weight),
            sums={name: float(value) for name, value in sums.items()},
            metrics={**measured(own), **metrics},
            flops=None if flops is None else flops.flops,
            flops_at_peak_ms=None if flops is None else flops.at_peak_ms,
            machine=(self._machine.read(least_s=0.0) if step == self._last_step else self._machine.read())
            if warm
            else None,
        )
        self._losses, self._weights, self._steps, self._updated, self._slowed = [], [], [], [], []
        self.data_wait.restart()
        if not warm:
            self._machine.restart()
        return point

    def _warm(self, step: int) -> bool:
        return step > self._warm_at and step not in self._slowed


def _machine_meter(device: torch.device) -> MachineMeter:
    if device.type != "cuda":
        return MachineMeter()
    return MachineMeter(GpuSharing(f"GPU-{torch.cuda.get_device_properties(device).uuid}").others_pct)


def peak_memory_mb(device: torch.device) -> float | None:
    """Return the peak memory of torch on the GPU, else of this process in RAM; None if the kernel does not count it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    peak = peak_bytes()
    return None if peak is None else peak / 1e6


COMPILE_S = MetricSpec(name="perf/compile_s", reduce="max")
RECOMPILES = MetricSpec(name="perf/recompiles", reduce="max")


class CompileMeter:
    """Measures how long torch compiles the model. Meanwhile the rank is in the phase ``compile``, which may take long.

    Attributes:
        recompiles: how often code was compiled again, for other inputs or in another mode.
    """

    def __init__(self, outbox: Outbox, *, enabled: bool):
        """``enabled``: whether the model is compiled; otherwise nothing is imported for it."""
        self.seconds = 0.0
        self.recompiles = 0
        self._outbox = outbox
        self._enabled = enabled
        self._began = 0.0
        self._phase = contextlib.ExitStack()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Measure what is compiled in this block."""
        with watching_compilation(self._begin, self._end) if self._enabled else contextlib.nullcontext():
            yield

    def metrics(self) -> Mapping[str, Metric]:
        """Return the metrics of a logged point; empty if the model is not compiled."""
        return measured({COMPILE_S: self.seconds, RECOMPILES: self.recompiles}) if self._enabled else {}

    def _begin(self, again: bool) -> None:
        self._began = time.perf_counter()
        self.recompiles += again
        self._phase.enter_context(self._outbox.within("compile"))

    def _end(self) -> None:
        self._phase.close()
        self._outbox.progress()
        self.seconds += time.perf_counter() - self._began


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
