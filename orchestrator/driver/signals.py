"""Being asked to stop: SIGINT and SIGTERM, from before Ray starts until it is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import psutil


class StopSignals:
    """SIGINT and SIGTERM while in the context: the first is noted, a second ends the process.

    While ``impatient``, the first one ends it too, with whatever it has started: there is nothing to save yet.
    ``last_words()`` is called before the process ends: to leave the terminal as it was.
    """

    def __init__(self, *, impatient: bool = False) -> None:
        self.received: signal.Signals | None = None
        self.impatient = impatient
        self.last_words: Callable[[], None] | None = None
        self._pid = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        # Python allows handlers in the main thread alone; elsewhere (a notebook's worker thread,
        # say) the surrounding program decides.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a child between fork and exec
        first = self.received is None
        self.received = signal.Signals(number)
        if first and not self.impatient:
            return
        if self.last_words is not None:
            self.last_words()
        if first:
            print(f"stopped by {self.received.name}: nothing was started", file=sys.stderr, flush=True)
        # An embedded Ray would end by itself, but its agents only after a minute.
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        os._exit(128 + number)
