"""SIGTERM to a worker, which batch systems send before they end a job: a notice to the driver instead of the end."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal


class TerminationNotice:
    """Catches SIGTERM in this process and remembers it.

    Python runs its signal handlers in the main thread, which never leaves Ray's C++ loop. The handler of
    ``faulthandler`` runs in C: the stack that it writes into a pipe is the notice.
    """

    def __init__(self) -> None:
        self._received = False
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)  # a full pipe must not block the handler
        faulthandler.register(signal.SIGTERM, file=self._writing, all_threads=False, chain=False)
        # A forked process has to end on SIGTERM, as multiprocessing expects.
        os.register_at_fork(after_in_child=functools.partial(faulthandler.unregister, signal.SIGTERM))

    def received(self) -> bool:
        """Return whether this process has received SIGTERM."""
        if not self._received:
            with contextlib.suppress(BlockingIOError):
                self._received = bool(os.read(self._reading, 1))
        return self._received
