"""The memory of this process: what it has taken and may still take, and whether freed memory goes back to the system.

glibc returns large blocks to the system as soon as they are freed. It adapts to reuse only in the heap of the main
thread, and training runs in another thread: every step would map its activations again, and the kernel would fill
them with zeros. So memory stays in the process, for the next step. torch asks for huge pages. The kernel maps and
fills them hundreds of times faster, and a step that reads much memory needs fewer entries in the CPU's tables.

Where parameters are gathered, blocks of many sizes come and go between small ones that stay. Kept memory is then in
pieces that nothing fits into, and a worker takes several times what it needs. There, large blocks are returned until
the first step has shown that there is memory for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
import os
import resource
from collections.abc import Callable
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


# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 32 * 2**20  # the largest threshold that glibc accepts
_RETURNED_BYTES = 4 * 2**20  # smaller blocks come and go too often
_TRIM_THRESHOLD_BYTES = 2**31 - 1
_CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def set_allocator(*, gathers: bool) -> None:
    """Ask for huge pages, and set the thresholds, each unless the environment has settings of its own.

    Call this before torch allocates memory: it reads the variable for huge pages once.

    Args:
        gathers: whether a worker gathers parameters, and frees them after use.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if (mallopt := _mallopt()) is None:
        return
    mallopt(_M_MMAP_THRESHOLD, _RETURNED_BYTES if gathers else _KEPT_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


def keep_if_plentiful(num_workers: int) -> None:
    """Keep large blocks, too, if each worker may take as much again as it has at its peak; otherwise return them.

    Kept memory comes to less than twice that peak.

    Args:
        num_workers: how many workers, at most, share the free memory of this machine.
    """
    if (mallopt := _mallopt()) is None:
        return
    is_plentiful = free_bytes() / num_workers >= (peak_bytes() or math.inf)
    mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES if is_plentiful else _RETURNED_BYTES)


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    """Return the function of glibc; None with another C library, or if the user has chosen its settings."""
    if any(name in os.environ for name in _CHOSEN_BY_USER):
        return None
    return getattr(ctypes.CDLL(None), "mallopt", None)
