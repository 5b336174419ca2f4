"""The C library's memory: what a training step frees stays with the process, for the next step.

glibc gives big freed blocks back to the system at once, and learns not to in the main thread's heap alone. Training
runs in another thread: every step would map its activations anew, and the system would fill them with zeros.
"""

from __future__ import annotations

import ctypes
import os

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 32 * 2**20  # the most that glibc takes
_TRIM_THRESHOLD_BYTES = 2**31 - 1
_CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> None:
    """Nothing happens where the environment has settings of its own, or where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _CHOSEN_BY_USER):
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
