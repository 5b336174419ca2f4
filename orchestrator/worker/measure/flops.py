"""The floating-point operations of a training step, counted while the second step of a generation runs.

The real step is counted, so this needs no second model, and it holds for every strategy: each rank counts what it
computes, also if the model is cut or the job makes its own updates.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from orchestrator.compat.torch import has_run_compiled_code
from orchestrator.strategies.measure.flop_counter import ComputePrecision, FlopCounter
from orchestrator.worker.measure.peak_flops import peak_flops_per_s


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

    def __init__(
        self,
        device: torch.device,
        *,
        at_step: int | None,
        compiled: bool = False,
        share: Callable[[], float] = lambda: 1,
    ):
        """Prepare to count.

        Args:
            device: where the step is computed.
            at_step: the step in which to count; None to count nothing.
            compiled: whether ``train.compile`` compiles the model.
            share: returns how much the operations that run now count.
        """
        self.step: StepFlops | None = None
        self._device = device
        self._at_step = at_step
        self._compiled = compiled
        self._share = share

    @contextlib.contextmanager
    def counting(self, step: int) -> Iterator[None]:
        """Count in this block, which computes ``step``, if that is the step in which to count."""
        if step != self._at_step:
            yield
            return
        with FlopCounter(self._share) as counter:
            yield
        if counter.error is not None:
            print(f"FLOPs not counted: {type(counter.error).__name__}: {counter.error}", file=sys.stderr)
        elif self._compiled or not has_run_compiled_code():
            name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else None
            self.step = step_flops(counter.flops, device_name=name)

    def slows(self, step: int) -> bool:
        """Return whether counting makes ``step`` noticeably longer."""
        return self._compiled and step == self._at_step


def step_flops(flops: Mapping[ComputePrecision | None, float], *, device_name: str | None) -> StepFlops:
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
