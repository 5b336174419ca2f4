"""The floating-point operations of a training step, counted while the second step of a generation runs.

The matrix products, convolutions and attention operators of the real step are counted by torch's own formulas, so this
needs neither a second model nor a second pass, and it holds for every strategy: each rank counts what it computes, also
if the model is cut or the job makes its own updates. Recomputed activations count as often as they are computed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestrator.compat.torch import TorchDispatchMode, flop_formula, has_run_compiled_code
from orchestrator.worker.peak_flops import Precision, peak_flops_per_s


class FlopCounter(TorchDispatchMode):
    """Counts FLOPs by the type of the operands, in its own thread and in the backward passes that this starts.

    Attributes:
        flops: the operations by precision; None for a type without one, such as float64.
        error: why the count is incomplete; None if it is not.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: dict[Precision | None, float] = {}
        self.error: Exception | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let code be compiled as without a counter, although its operations are not seen."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (formula := flop_formula(func)) is not None:
            try:
                precision = _precision_of(func, args[0])
                self.flops[precision] = self.flops.get(precision, 0.0) + formula(*args, **kwargs, out_val=out)
            except Exception as e:
                self.error = e
        return out


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """The work of this rank in a step.

    Attributes:
        flops: the floating-point operations.
        at_peak_ms: how long the device of this rank takes for them at its peak rate; None if that is unknown.
    """

    flops: float
    at_peak_ms: float | None


class FlopMeter:
    """Counts the FLOPs of one step. A failure to count is no failure of the step.

    Attributes:
        step: the result; None if nothing was counted.
    """

    def __init__(self, device: torch.device, *, at_step: int | None):
        """``at_step``: the step in which to count; None to count nothing."""
        self.step: StepFlops | None = None
        self._device = device
        self._at_step = at_step

    @contextlib.contextmanager
    def counting(self, step: int) -> Iterator[None]:
        """Count in this block, which computes ``step``, if that is the step in which to count."""
        if step != self._at_step:
            yield
            return
        counter = FlopCounter()
        with counter:
            yield
        if counter.error is not None:
            print(f"FLOPs not counted: {type(counter.error).__name__}: {counter.error}", file=sys.stderr)
        elif not has_run_compiled_code():
            name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else None
            self.step = step_flops(counter.flops, device_name=name)


def step_flops(flops: dict[Precision | None, float], *, device_name: str | None) -> StepFlops:
    """Return the work of a step.

    Args:
        flops: the operations by precision.
        device_name: the name of the GPU; None on a CPU.
    """
    at_peak_s: float | None = None if device_name is None else 0.0
    for precision, count in flops.items():
        peak = peak_flops_per_s(device_name, precision) if device_name and precision else None
        at_peak_s = None if at_peak_s is None or peak is None else at_peak_s + count / peak
    return StepFlops(flops=sum(flops.values()), at_peak_ms=None if at_peak_s is None else at_peak_s * 1e3)


def _precision_of(operator: Any, operand: Tensor) -> Precision | None:
    match operand.dtype:
        case torch.bfloat16:
            return "bf16"
        case torch.float16:
            return "fp16"
        case torch.float32:
            backends: Any = torch.backends
            settings = backends.cudnn.conv if "convolution" in str(operator) else backends.cuda.matmul
            return "tf32" if settings.fp32_precision == "tf32" else "fp32"
    return None
