"""How code of the user that one rank runs alone ends when the ranks have to stop."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

from orchestrator.worker.control.control import CutOff

GRACE_SHARE = 0.25
"""The share of ``cluster.stop_grace_s`` that such code has to end by itself; the rest is for the checkpoint."""

LATER_SHARE = 0.25
"""The share of that time which later calls have, once it is over: the ranks may still have one step to end."""

Returned = TypeVar("Returned")


class Interruption:
    """Raises :class:`CutOff` in the training thread while it runs code of the user that no other rank waits within.

    Python raises it before the next line, so that a call that does not return, such as a long ``time.sleep``, ends
    first.

    Args:
        is_due: whether the ranks have to stop.
        delay_s: how long the code has to end by itself.
    """

    def __init__(self, is_due: Callable[[], bool], *, delay_s: float):
        self._is_due = is_due
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._thread: int | None = None  # the one that may be interrupted
        self._is_asked = False
        self._is_late = False  # whether the delay is over

    def run(self, call: Callable[[], Returned]) -> Returned:
        """Return what ``call()`` returns.

        Raises:
            CutOff: it took too long.
            Exception: whatever ``call`` raises.
        """
        later = self._raise_after(self._delay_s * LATER_SHARE) if self._is_late and self._is_due() else None
        try:
            self._thread = threading.get_ident()
            return call()
        finally:
            while self._thread is not None:
                with contextlib.suppress(CutOff), self._lock:  # it may come here too: the call has ended then
                    self._thread = None
            if later is not None:
                later.cancel()

    def look(self) -> None:
        """Begin the delay if the ranks have to stop; called whenever that may be so."""
        if self._is_due() and not self._is_asked:
            self._is_asked = True
            self._raise_after(self._delay_s)
        elif not self._is_due():
            self._is_asked = self._is_late = False

    def _raise_after(self, delay_s: float) -> threading.Timer:
        timer = threading.Timer(delay_s, self._raise)
        timer.daemon = True
        timer.start()
        return timer

    def _raise(self) -> None:
        with self._lock:
            self._is_late = True
            if self._thread is not None and self._is_due():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(CutOff))
