"""The device that computes: its precision, its time, and the memory of the training state there.

The calls of a step only enqueue work on a GPU, and return before it is done. So marks there are events, which are read
after the step.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn

from orchestrator.state.optimizers import AnyOptimizer


def free_memory(device: torch.device) -> int:
    """Return the free memory of ``device`` in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


class DeviceClock:
    """Marks points in the work of a device; this one, of a CPU."""

    def mark(self) -> Any:
        """Return a mark behind what has been enqueued. Does not wait."""
        return time.perf_counter()

    def ms_between(self, start: Any, end: Any) -> float:
        """Return the milliseconds from one mark to another. Waits until the device has reached both."""
        return float(end - start) * 1e3


class _CudaClock(DeviceClock):
    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end))


def clock_of(device: torch.device) -> DeviceClock:
    """Return the clock of ``device``, for the thread and the stream that compute on it."""
    return _CudaClock() if device.type == "cuda" else DeviceClock()


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


TensorKind = Literal["parameter", "buffer", "gradient", "optimizer state"]


@dataclass(frozen=True)
class TensorSize:
    """The size of a tensor, or of all optimizer state of a parameter.

    Attributes:
        name: the name of the parameter or buffer.
        device_type: where it is, such as ``cuda``. Parameters may be in host memory, and their state with them.
    """

    name: str
    kind: TensorKind
    size_bytes: int
    device_type: str


def sizes_of(module: nn.Module, optimizer: AnyOptimizer) -> Iterator[TensorSize]:
    """Yield the size of each tensor of ``module``, of its gradient, and of what ``optimizer`` keeps for it."""
    state = optimizer.state
    for name, buffer in module.named_buffers():
        yield TensorSize(name, "buffer", buffer.nbytes, buffer.device.type)
    for name, parameter in module.named_parameters():
        device_type = parameter.device.type
        yield TensorSize(name, "parameter", parameter.nbytes, device_type)
        if parameter.grad is not None:
            yield TensorSize(name, "gradient", parameter.grad.nbytes, device_type)
        if kept := sum(v.nbytes for v in state.get(parameter, {}).values() if isinstance(v, Tensor)):
            yield TensorSize(name, "optimizer state", kept, device_type)


class PrecisionError(ValueError):
    """The device does not compute in ``train.precision``; the text says what to set."""


def prepare_device(precision: str, device: torch.device) -> None:
    """Let the device compute in ``train.precision``.

    Raises:
        PrecisionError: it cannot.
    """
    if device.type != "cuda":
        return
    name, has_bf16 = torch.cuda.get_device_name(device), torch.cuda.is_bf16_supported(including_emulation=False)
    if error := precision_error(precision, device_name=name, has_bf16=has_bf16):
        raise PrecisionError(error)
    set_tf32(precision == "tf32")


def set_tf32(enabled: bool) -> None:
    """Choose whether GPUs compute float32 matrix products and convolutions in TF32.

    By default torch computes convolutions in TF32, but not matrix products.
    """
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    torch.backends.cudnn.allow_tf32 = enabled


def precision_error(precision: str, *, device_name: str, has_bf16: bool) -> str | None:
    """Return why a GPU does not compute in ``precision`` and what to set instead; None if it does."""
    if has_bf16 or not precision.startswith("bf16"):
        return None
    return f"train.precision={precision}: {device_name} has no bfloat16 arithmetic; set it to fp16 or fp32"


def now(device: torch.device) -> float:
    """Return the time in seconds at which ``device`` has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def medians_ms(calls: Sequence[Callable[[], object]], device: torch.device, *, runs: int) -> tuple[float, ...]:
    """Return the median time of each call in milliseconds. They are made in turn, the first time without being timed.

    Args:
        device: where the calls compute.
        runs: how often to time each.
    """
    times: list[list[float]] = []
    for _ in range(1 + runs):
        ends = [now(device)]
        for call in calls:
            call()
            ends.append(now(device))
        times.append([(end - start) * 1e3 for start, end in itertools.pairwise(ends)])
    return tuple(map(statistics.median, zip(*times[1:], strict=True)))
