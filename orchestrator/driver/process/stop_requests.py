"""Requests to stop a run that come as a file in its directory, from whatever host."""

from __future__ import annotations

import contextlib
import signal
import threading

from orchestrator.driver.process.signals import StopSignals
from orchestrator.records.run_dir import RunDir
from orchestrator.records.stop_request import stop_requested_by

LOOK_EVERY_S = 1.0
LOOK_EVERY_REMOTE_S = 5.0
"""The interval on a store, where looking is a request."""
_END_TIMEOUT_S = 2.0


class StopRequests:
    """While in the context, turns the request to stop a run into a stop of its driver, as by SIGTERM."""

    def __init__(self, run_dir: RunDir, stop: StopSignals):
        self._run_dir = run_dir
        self._stop = stop
        self._every_s = LOOK_EVERY_S if run_dir.remote is None else LOOK_EVERY_REMOTE_S
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="stop-requests", daemon=True)

    def __enter__(self) -> StopRequests:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_END_TIMEOUT_S)

    def _work(self) -> None:
        while not self._ended.wait(self._every_s):
            with contextlib.suppress(OSError, ValueError):  # the store is away, for example: look again later
                if (who := stop_requested_by(self._run_dir)) is not None:
                    return self._stop.request(signal.SIGTERM, f"`orchestrator stop` of {who}")
