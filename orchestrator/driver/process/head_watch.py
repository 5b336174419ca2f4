"""Notices that the head of the joined cluster is lost, while the run can still be ended in order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from orchestrator.compat.ray.connection import RECONNECT_TIMEOUT, probe_gcs, reconnect_timeout_s

LOST_AFTER = 0.8
"""The part of Ray's own timeout after which the head counts as lost: at its end, the nodes kill the workers."""
_PROBE_EVERY_S, _PROBES = 5.0, 8
_PROBE_TIMEOUT_S = 5.0
_JOIN_TIMEOUT_S = 1.0
_NO_ANSWER = ("unavailable", "deadline_exceeded")

_watches: list[HeadWatch] = []


class HeadWatch:
    """Asks the GCS server at ``address`` every few seconds whether it lives. Use as a context manager.

    Args:
        timeout_s: how long it may give no answer.
    """

    def __init__(self, address: str, timeout_s: float):
        self._address = address
        self._timeout_s = timeout_s
        self._silent_s = 0.0
        self._closed = threading.Event()
        # A thread of its own: the other ones may wait for the server.
        self._thread = threading.Thread(target=self._work, name="head-watch", daemon=True)

    def __enter__(self) -> HeadWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def why_lost(self) -> str | None:
        """Return that the server has not answered for too long, as a sentence; None if it has."""
        if self._silent_s < self._timeout_s:
            return None
        return (
            f"the head of the Ray cluster ({self._address}) has not answered for {self._silent_s:.0f} s, and the nodes "
            f"end after {reconnect_timeout_s():g} s ({RECONNECT_TIMEOUT}); start the cluster again, and resume the run"
        )

    def _work(self) -> None:
        silent_since: float | None = None  # counted from a missing answer, because this process may have been stopped
        while not self._closed.wait(min(_PROBE_EVERY_S, self._timeout_s / _PROBES)):
            asked_at = time.monotonic()
            if probe_gcs(self._address, timeout_s=_PROBE_TIMEOUT_S) not in _NO_ANSWER:
                silent_since, self._silent_s = None, 0.0
                continue
            silent_since = asked_at if silent_since is None else silent_since
            self._silent_s = time.monotonic() - silent_since


@contextlib.contextmanager
def watched_head(address: str) -> Iterator[None]:
    """Watch the head of the cluster whose GCS server is at ``address``, for :func:`why_head_lost`."""
    with HeadWatch(address, LOST_AFTER * reconnect_timeout_s()) as watch:
        _watches.append(watch)
        try:
            yield
        finally:
            _watches.remove(watch)


def why_head_lost() -> str | None:
    """Return that the head of the cluster is lost, as a sentence; None if it is not, or is not watched."""
    return next((why for watch in _watches if (why := watch.why_lost()) is not None), None)
