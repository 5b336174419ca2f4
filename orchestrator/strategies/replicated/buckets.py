"""The size of the buckets in which ``DistributedDataParallel`` exchanges gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor

SMALLEST_MB, LARGEST_MB = 25.0, 200.0
"""Limits of ``auto`` in MiB: torch's default, and somewhat more than the 40 million gradients of Megatron-LM."""
BUCKETS = 8
"""The buckets of a model that is large enough. Few large messages use the network best, but the exchange overlaps with
the backward pass only from the first complete bucket on; see Li et al., VLDB 2020, "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training"."""


def bucket_arguments(parameters: Iterable[Tensor], option: float | Literal["auto"], *, device: str) -> dict[str, Any]:
    """Return the arguments of ``DistributedDataParallel`` for the buckets that :func:`bucket_mb_for` chooses.

    Without a size, torch makes the first bucket small, so that the exchange begins early in the backward pass. With
    one, even with the limit of torch, the first is as large as the others.
    """
    size_mb = bucket_mb_for(parameters, option, device=device)
    leaves_to_torch = option == "auto" and device != "cpu" and size_mb == SMALLEST_MB
    return {} if leaves_to_torch else {"bucket_cap_mb": size_mb}


def bucket_mb_for(parameters: Iterable[Tensor], option: float | Literal["auto"], *, device: str) -> float:
    """Return the size of the buckets in MiB.

    Args:
        parameters: the parameters of the model; a gradient has the size of its parameter.
        option: the value of ``strategy.bucket_mb``.
        device: the type of the device; on CPUs, ``auto`` is torch's default.
    """
    if option != "auto":
        return option
    if device == "cpu":
        return SMALLEST_MB
    gradients_mb = sum(p.nbytes for p in parameters if p.requires_grad) / 2**20
    return float(round(min(LARGEST_MB, max(SMALLEST_MB, gradients_mb / BUCKETS))))
