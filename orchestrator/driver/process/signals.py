"""Requests to stop: SIGINT, SIGTERM and SIGHUP to the driver, and a file in the directory of the run, from any host."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import psutil

from orchestrator.protocol.events import Sink
from orchestrator.records.run_dir import RunDir, stop_requested_by
from orchestrator.user_code.breakpoints import held_at

SAME_SIGNAL_S = 0.2
"""On the command line, the same signal within this time is the first one again: Ctrl-C reaches every process of a
terminal, and ``--restarts`` passes it on."""
LOOK_EVERY_S = 1.0
LOOK_EVERY_REMOTE_S = 5.0
"""The interval on a store, where looking is a request."""
_END_TIMEOUT_S = 2.0


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop: not SIGHUP if that is ignored, as below ``nohup``."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if is_ignored else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Handles signals to stop while in the context: records the first one, and gives up at the second.

    SIGHUP, which a closed terminal sends, and its shell once more, counts as a first signal only.

    On the command line (``owns_process``), the second signal ends the process. A Python program or a notebook, which
    has called :func:`orchestrator.run`, goes on: the second signal raises :class:`KeyboardInterrupt` (SIGINT) or
    :class:`SystemExit` (SIGTERM) there, once.

    Attributes:
        owns_process: whether the command line has begun the run.
        received: the last signal; None if there was none.
        cause: the name of the signal, or what :meth:`request` was given.
        is_pruned: whether only the run in progress is to stop, until :meth:`end_run`.
        exit_at_once: end the process at the first signal, with every process that it started, because there is nothing
            to save yet.
        console: closed before the process ends, to leave the terminal as it was.
    """

    def __init__(self, *, owns_process: bool = False) -> None:
        self.received: signal.Signals | None = None
        self.cause = ""
        self.is_pruned = False
        self._received_at = 0.0
        self.exit_at_once = owns_process
        self.console: Sink | None = None
        self.owns_process = owns_process
        self._may_raise = False
        self._raised: BaseException | None = None
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
            for number in stop_signals():
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            if handler is not None:  # None: not set from Python, so that Python cannot restore it
                signal.signal(number, handler)

    def request(self, number: signal.Signals, cause: str) -> None:
        """Stop the run as a first signal would; nothing more if one has come already. May be called by any thread."""
        if self.received is None:
            self.cause, self._received_at, self.received = cause, time.monotonic(), number

    def prune(self) -> None:
        """Stop the run in progress, but none after it; nothing more if a signal has come already."""
        if self.received is None:
            self.is_pruned = True
            self.request(signal.SIGTERM, "sweep.pruner")

    def end_run(self) -> None:
        """Forget that a run was pruned."""
        if self.is_pruned:
            self.is_pruned, self.received = False, None

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Let a second signal raise an exception in this context. Elsewhere it would interrupt a release of workers."""
        self._may_raise = not self.owns_process
        try:
            yield
        finally:
            self._may_raise = False
            if self._raised is not None:  # Ray replaces a SystemExit by an error of its own
                raise self._raised

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a child between fork and exec
        if number == signal.SIGINT and held_at(frame) is not None:
            raise KeyboardInterrupt  # for the debugger, at whose prompt the user types
        if number == signal.SIGHUP and self.received is not None:
            return
        first = self.is_pruned or self.received in (None, signal.SIGHUP)
        if not first and self.owns_process and number == self.received and self.seconds_ago < SAME_SIGNAL_S:
            return
        received = signal.Signals(number)
        self.is_pruned = False
        self.cause, self._received_at, self.received = received.name, time.monotonic(), received
        if first and not self.exit_at_once:
            return
        if not self.owns_process:
            if self._may_raise:
                self._may_raise = False
                self._raised = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
                raise self._raised
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


STOP_WAIT_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
"""Ray reads it in the environment of the job."""
DEFAULT_STOP_WAIT_S = 3
"""That of Ray."""
STOP_MARGIN_S = 10
"""What the driver needs after ``cluster.stop_grace_s``, to release its workers and write its records."""


def needed_stop_wait_s(stop_grace_s: float) -> int:
    """Return how long Ray has to wait for a run with this ``cluster.stop_grace_s``, in whole seconds."""
    return math.ceil(stop_grace_s) + STOP_MARGIN_S


def stop_wait_warning(stop_grace_s: float, environment: Mapping[str, str]) -> str | None:
    """Return a warning if Ray may kill a stopped job before the last checkpoint of a run; None if it waits long enough.

    Args:
        stop_grace_s: ``cluster.stop_grace_s`` of the run.
        environment: the environment of the job.
    """
    given = environment.get(STOP_WAIT_VARIABLE, "")
    wait_s = int(given) if given.isdecimal() else DEFAULT_STOP_WAIT_S
    needed_s = needed_stop_wait_s(stop_grace_s)
    if wait_s >= needed_s:
        return None
    return (
        f"`ray job stop` kills this job after {wait_s} s, and the last checkpoint of a run may take longer "
        f"(cluster.stop_grace_s={stop_grace_s:g}): use `orchestrator submit`, or set {STOP_WAIT_VARIABLE}={needed_s} "
        "in the runtime environment of the job"
    )
