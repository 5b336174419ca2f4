"""The memory of this process: what it has taken, what it may still take, and what a discarded model holds."""

from __future__ import annotations

import contextlib
import gc
import resource
from pathlib import Path

import psutil
import torch

from orchestrator.worker.process.node_facts import MEMORY_FILES


def peak_bytes() -> int | None:
    """Return the peak resident memory of this process; None if the kernel does not count it.

    ``getrusage`` does not serve: its peak includes the peak of the process from which this one was forked.
    """
    return _status().get("VmHWM")


def free_bytes() -> int:
    """Return how much more this process may take, as far as its machine, its container and its own limits have it."""
    free = [psutil.virtual_memory().available]
    for limit, name in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        if (most := resource.getrlimit(limit)[0]) != resource.RLIM_INFINITY:
            free.append(most - _status()[name])
    for limit_file, used_file in MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError):  # it is "max" without a limit
            free.append(int(Path(limit_file).read_text()) - int(Path(used_file).read_text()))
    return min(free)


def free_unreachable(device: torch.device) -> None:
    """Free objects that only refer to each other, such as a strategy and its schedule, and their memory on ``device``.

    Python's collector counts objects and not bytes, so that by itself it may leave a discarded model for many steps.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _status() -> dict[str, int]:
    """Return the sizes that the kernel counts for this process, in bytes."""
    fields = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {name[:-1]: int(kib[0]) * 1024 for name, *kib in fields if kib[1:] == ["kB"]}
