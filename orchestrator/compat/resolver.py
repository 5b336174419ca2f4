"""The resolver of glibc, which torch asks for names that nobody reads. Checked with glibc 2.36.

``struct __res_state`` of <resolv.h> belongs to one thread. Its first two numbers, ``retrans`` and ``retry``, say how
long and how often a name server is asked.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator


@contextlib.contextmanager
def without_name_servers() -> Iterator[None]:
    """Let this thread ask no name server for a name in this context; ``/etc/hosts`` and plain addresses still work.

    torch looks up the name of every address that it connects to, for its messages, and waits 10 s for a name server
    that does not answer. Changes nothing with another C library than glibc.
    """
    libc = ctypes.CDLL(None)
    try:
        initialise, state_of_thread = (getattr(libc, name) for name in ("__res_init", "__res_state"))
    except AttributeError:
        yield
        return
    initialise()  # otherwise the first look-up does, and sets the numbers
    state_of_thread.restype = ctypes.POINTER(ctypes.c_int * 2)
    state = state_of_thread().contents
    retry, state[1] = state[1], 0
    try:
        yield
    finally:
        state[1] = retry
