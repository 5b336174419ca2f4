"""What torch can compute on the GPUs that Ray has given to this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from orchestrator.protocol.messages import WorkerInfo


def with_gpus(info: WorkerInfo, ids: Sequence[str]) -> WorkerInfo:
    """Add what torch finds on the GPUs of this process, at least one; ``ids``: as for :func:`gpu_error`."""
    if (error := gpu_error(ids)) is not None:
        return replace(info, gpu_error=error)
    return replace(
        info,
        gpu_index=int(ids[0]) if ids[0].isdigit() else None,
        gpu_uuid=str(torch.cuda.get_device_properties(0).uuid),
        has_bf16=has_bf16(len(ids)),
    )


def gpu_error(ids: Sequence[str]) -> str | None:
    """Return which GPU torch cannot compute on, and why; None if it can compute on all.

    A GPU that is visible may still be unusable: too old or too new for this build of torch, faulty, full, or occupied
    by another process. That shows when a kernel runs.

    Args:
        ids: the GPUs of this process as Ray numbers them, in the order of torch's devices.
    """
    for index, gpu in enumerate(ids):
        try:
            torch.ones(1, device=f"cuda:{index}").add_(1).item()
        except (AssertionError, RuntimeError) as e:  # AssertionError: this build of torch has no CUDA
            return f"GPU {gpu}: {str(e).strip().partition(chr(10))[0]}"
    return None


def has_bf16(count: int) -> bool:
    """Return whether the first ``count`` GPUs of this process, at least one, all compute in bfloat16."""
    return count > 0 and all(_has_bf16(index) for index in range(count))


def _has_bf16(index: int) -> bool:
    with torch.cuda.device(index):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
