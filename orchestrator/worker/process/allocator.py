"""Settings of the C library's allocator: memory that a training step frees stays in the process, for the next step.

glibc returns large blocks to the system as soon as they are freed. It adapts to reuse only in the heap of the main
thread, and training runs in another thread: every step would map its activations again, and the kernel would fill
them with zeros.
"""

from __future__ import annotations

import ctypes
import os

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 32 * 2**20  # the largest value that glibc accepts
_TRIM_THRESHOLD_BYTES = 2**31 - 1
_CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> None:
    """Set the thresholds, unless the environment has its own allocator settings or the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _CHOSEN_BY_USER):
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
