"""Settings of the C library's allocator: what happens to the memory that a training step frees.

glibc returns large blocks to the system as soon as they are freed. It adapts to reuse only in the heap of the main
thread, and training runs in another thread: every step would map its activations again, and the kernel would fill
them with zeros. So memory stays in the process, for the next step. torch asks for huge pages, which the kernel maps and
fills hundreds of times faster, and of which a step that reads much memory needs fewer entries in the CPU's tables.

Where parameters are gathered, blocks of many sizes come and go between small ones that stay. Kept memory is then in
pieces that nothing fits into, and a worker takes several times what it needs. There, large blocks are returned until
the first step has shown that there is memory for that.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable

from orchestrator.worker.process.memory import free_bytes, peak_bytes

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
