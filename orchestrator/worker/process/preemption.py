"""SIGTERM to a worker, as batch systems send it before they end a job: a word to the driver instead of the end."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import threading


class TerminationNotice:
    """``received``: somebody has asked this process to end.

    Python's own handlers run in the main thread alone, where Ray's C++ loop never lets them; that of ``faulthandler``
    is one in C, and what it writes into a pipe is the signal.
    """

    def __init__(self) -> None:
        self.received = False
        self._reading, self._writing = os.pipe()
        threading.Thread(target=self._wait, name="termination-notice", daemon=True).start()
        faulthandler.register(signal.SIGTERM, file=self._writing, all_threads=False, chain=False)
        # A process that is forked from this one is asked to end by this one, and has to.
        os.register_at_fork(after_in_child=functools.partial(faulthandler.unregister, signal.SIGTERM))

    def _wait(self) -> None:
        os.read(self._reading, 1)
        self.received = True
        while os.read(self._reading, 4096):  # a full pipe would block the handler
            pass
