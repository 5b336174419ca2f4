"""The floating-point operations of a training step, and the peak rates of GPUs.

They are counted while the second step of a generation runs. The real step is counted, so this needs no second model,
and it holds for every strategy: each rank counts what it computes, also if the model is cut or the job makes its own
updates.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from orchestrator.compat.torch import has_run_compiled_code
from orchestrator.strategies.measure.flop_counter import ComputePrecision, FlopCounter
from orchestrator.worker.process.output import log_only


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """The work of this rank in a step.

    Attributes:
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
        """Count in this block, which computes ``step``, if ``step`` is to be counted."""
        if step != self._at_step:
            yield
            return
        with FlopCounter(self._share) as counter:
            yield
        if counter.error is not None:
            with log_only() as log:
                print(f"FLOPs not counted: {type(counter.error).__name__}: {counter.error}", file=log)
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


@dataclass(frozen=True)
class Peak:
    """The peak rate of a device in TFLOP/s by precision, as data sheets give it; None if it has no unit for it."""

    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float


_H100 = Peak(fp32=67, tf32=494.5, bf16=989.5, fp16=989.5)
_H100_PCIE = Peak(fp32=51, tf32=378, bf16=756.5, fp16=756.5)
_PEAKS = {
    r"NVIDIA GB200": Peak(fp32=80, tf32=1250, bf16=2500, fp16=2500),
    r"NVIDIA B300( SXM6 AC)?": Peak(fp32=75, tf32=1125, bf16=2250, fp16=2250),
    r"NVIDIA B200": Peak(fp32=75, tf32=1100, bf16=2250, fp16=2250),
    r"NVIDIA (GH200 .*|H200|H800)": _H100,
    r"NVIDIA H200 NVL": Peak(fp32=60, tf32=417.5, bf16=835.5, fp16=835.5),
    r"NVIDIA H100 80GB HBM3": _H100,
    r"NVIDIA H100 NVL": Peak(fp32=60, tf32=417.5, bf16=835.5, fp16=835.5),
    r"NVIDIA H[18]00 PCIe": _H100_PCIE,
    r"NVIDIA H20(-3e)?": Peak(fp32=44, tf32=74, bf16=148, fp16=148),
    r"(NVIDIA )?A[18]00[- ](SXM4-40GB|SXM4-80GB|PCIE-40GB|PCIE-80GB|80GB PCIe)": Peak(
        fp32=19.5, tf32=156, bf16=312, fp16=312
    ),
    r"NVIDIA A40": Peak(fp32=37.4, tf32=74.8, bf16=149.7, fp16=149.7),
    r"NVIDIA A30": Peak(fp32=10.3, tf32=82, bf16=165, fp16=165),
    r"NVIDIA A10": Peak(fp32=31.2, tf32=62.5, bf16=125, fp16=125),
    r"NVIDIA L4": Peak(fp32=30.3, tf32=60, bf16=121, fp16=121),
    r"NVIDIA L40": Peak(fp32=90.5, tf32=90.5, bf16=181, fp16=181),
    r"NVIDIA L40S": Peak(fp32=91.6, tf32=183, bf16=362, fp16=362),
    r"Tesla V100-SXM2-.*": Peak(fp32=15.7, tf32=None, bf16=None, fp16=125),
    r"Tesla V100-PCIE-.*": Peak(fp32=14, tf32=None, bf16=None, fp16=112),
    r"Tesla T4": Peak(fp32=8.1, tf32=None, bf16=None, fp16=65),
    r"NVIDIA GeForce RTX 3090": Peak(fp32=35.6, tf32=35.6, bf16=71, fp16=71),
    r"NVIDIA GeForce RTX 4090": Peak(fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2),
    r"NVIDIA GeForce RTX 5090": Peak(fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5),
    r"NVIDIA RTX 6000 Ada Generation": Peak(fp32=91.1, tf32=182.1, bf16=364.2, fp16=364.2),
    r"NVIDIA RTX PRO 6000 Blackwell Workstation Edition": Peak(fp32=125, tf32=251.9, bf16=503.8, fp16=503.8),
    r"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": Peak(fp32=110, tf32=219.4, bf16=438.9, fp16=438.9),
    r"NVIDIA RTX PRO 6000 Blackwell Server Edition": Peak(fp32=120, tf32=240, bf16=480, fp16=480),
    r"AMD Instinct MI300X( OAM| VF)?": Peak(fp32=163.4, tf32=653.7, bf16=1307.4, fp16=1307.4),
}
"""The peak rates of GPUs, by the name that the driver gives them.

The figures come from the data sheets of NVIDIA and AMD, without sparsity: one that is given with sparsity is halved.

| devices | source |
| --- | --- |
| GB200 | NVIDIA GB200 NVL72, specifications of a GPU |
| B200 | NVIDIA DGX B200 and HGX B200, specifications |
| B300 | NVIDIA HGX B300, specifications, divided by its 8 GPUs |
| GH200 | NVIDIA GH200 Grace Hopper Superchip data sheet |
| H200 SXM, H200 NVL | NVIDIA H200 Tensor Core GPU data sheet |
| H100 SXM, H100 NVL | NVIDIA H100 Tensor Core GPU data sheet |
| H100 PCIe | NVIDIA H100 Tensor Core GPU data sheet, edition of 2022 |
| H800 SXM, H800 PCIe | NVIDIA H800 Tensor Core GPU data sheet: as H100, with slower links and FP64 |
| H20 | NVIDIA H20 GPU data sheet |
| A100 | NVIDIA A100 Tensor Core GPU data sheet |
| A800 | NVIDIA A800 Tensor Core GPU data sheet: as A100, with slower links |
| A40 | NVIDIA A40 data sheet |
| A30 | NVIDIA A30 Tensor Core GPU data sheet |
| A10 | NVIDIA A10 Tensor Core GPU data sheet |
| L4, L40, L40S | their NVIDIA data sheets |
| V100 | NVIDIA V100 Tensor Core GPU data sheet |
| T4 | NVIDIA T4 Tensor Core GPU data sheet |
| RTX 3090 | NVIDIA Ampere GA102 GPU architecture white paper, with accumulation in FP32 |
| RTX 4090 | NVIDIA Ada GPU architecture white paper, with accumulation in FP32 |
| RTX 5090 | NVIDIA RTX Blackwell GPU architecture white paper, with accumulation in FP32 |
| RTX 6000 Ada | its NVIDIA data sheet; FP8 with sparsity is four times BF16 |
| RTX PRO 6000 | data sheets of its editions; the others follow from FP4 with sparsity, or from FP32 (Server) |
| MI300X | AMD Instinct MI300X data sheet |
"""
_PART = re.compile(r"\bMIG\b")
"""In the name of a part of a device, which has a part of its peak rate."""


def peak_flops_per_s(device_name: str, precision: ComputePrecision) -> float | None:
    """Return the peak rate of a device in FLOP/s; None if it is unknown.

    Args:
        device_name: the name as ``torch.cuda.get_device_name`` returns it. A similar name is another device.
        precision: what is computed in.
    """
    if _PART.search(device_name):
        return None
    peak = next((peak for name, peak in _PEAKS.items() if re.fullmatch(name, device_name)), None)
    if peak is None:
        return None
    tflops = {"fp32": peak.fp32, "tf32": peak.tf32 or peak.fp32, "bf16": peak.bf16, "fp16": peak.fp16}[precision]
    return None if tflops is None else tflops * 1e12
