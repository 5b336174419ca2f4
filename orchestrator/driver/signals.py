"""SIGINT and SIGTERM to the driver, from before Ray starts until it has shut down."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import psutil

from orchestrator.protocol.events import Sink


class StopSignals:
    """Handles SIGINT and SIGTERM while in the context: records the first signal, ends the process at the second.

    ``received``: the last signal; None if there was none.
    ``exit_at_once``: end the process at the first signal, with every process that it started, because there is nothing
    to save yet.
    ``console``: closed before the process ends, to leave the terminal as it was.
    """

    def __init__(self, *, exit_at_once: bool = False) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self.exit_at_once = exit_at_once
        self.console: Sink | None = None
        self._pid = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def seconds_ago(self) -> float:
        """The seconds since the last signal."""
        return time.monotonic() - self._received_at

    def __enter__(self) -> StopSignals:
        # Python allows signal handlers only in the main thread. In another one (of a notebook, say) the surrounding
        # program decides what a signal does.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a child between fork and exec
        first = self.received is None
        self.received, self._received_at = signal.Signals(number), time.monotonic()
        if first and not self.exit_at_once:
            return
        if self.console is not None:
            self.console.close()
        if first:
            print(f"stopped by {self.received.name}: nothing was started", file=sys.stderr, flush=True)
        # The agents of an embedded Ray would outlive this process by a minute.
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        os._exit(128 + number)
