"""The memory of a model that a process has discarded."""

from __future__ import annotations

import gc

import torch


def free_unreachable(device: torch.device) -> None:
    """Free objects that only refer to each other, such as a strategy and its schedule, and their memory on ``device``.

    Python's collector counts objects and not bytes, so that by itself it may leave a discarded model for many steps.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
