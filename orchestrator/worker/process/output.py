"""The output of a worker process, which goes to the log of its rank, and the stacks of its threads."""

from __future__ import annotations

import abc
import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

from orchestrator import features
from orchestrator.protocol.flight import enqueued_in
from orchestrator.protocol.messages import FlightRecord, Stacks
from orchestrator.records.rank_log import C_STACK, PART_BYTES, log_header, newest_part, next_part
from orchestrator.worker.process.shown_lines import LogTail

_FATAL = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_SIGACTION_BYTES = 1024
"""More than the size of ``struct sigaction`` on any platform."""
_MAX_FRAMES = 256
_STDERR = 2

_libc = ctypes.CDLL(None)
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_libc.signal.restype = ctypes.c_void_p
_frames = (ctypes.c_void_p * _MAX_FRAMES)()
_title = C_STACK.encode()
CHECK_EVERY_S = 10.0


@ctypes.CFUNCTYPE(None, ctypes.c_int)  # type: ignore[untyped-decorator]
def _write_c_stack(number: int) -> None:
    _libc.signal(number, None)  # the default: another fault, or the end of this function, ends the process
    _libc.write(_STDERR, _title, len(_title))
    _libc.backtrace_symbols_fd(_frames, _libc.backtrace(_frames, _MAX_FRAMES), _STDERR)
    getattr(_libc, "raise")(number)


def enable_crash_reports() -> None:
    """Write the Python stacks, then the C stack, to file descriptor 2 when a signal such as SIGSEGV ends the process.

    Three handlers of fatal signals are chained in the order in which the risk grows:

    1. Ray's, which ends the process three seconds later in any case,
    2. Python's ``faulthandler``, which writes the Python stacks and needs neither memory nor the interpreter lock,
    3. the one of this module. It runs Python code in the thread that crashed, and so may wait for the interpreter lock
       or for a damaged heap until Ray's alarm.

    torch has a handler as well. It is not used because it asks every thread for its stack and gives up at the first
    that blocks signals, as some of Ray's threads do.
    """
    outermost = {int(number): ctypes.create_string_buffer(_SIGACTION_BYTES) for number in _FATAL}
    for number, action in outermost.items():
        _libc.sigaction(number, None, action)
    was_enabled = faulthandler.is_enabled()
    faulthandler.disable()
    with contextlib.suppress(AttributeError):  # the C library has no backtrace()
        _libc.backtrace(_frames, _MAX_FRAMES)  # loads the library that it needs
        for number in outermost:
            _libc.signal(number, ctypes.cast(_write_c_stack, ctypes.c_void_p))
    faulthandler.enable()
    if was_enabled:  # Ray's handler was installed after faulthandler and calls it
        for number, action in outermost.items():
            _libc.sigaction(number, action, None)


class Output(abc.ABC):
    """Brings the output of a process to the log of its rank."""

    @abc.abstractmethod
    def redirect(self, log: Path) -> None:
        """Write to ``log`` from now on."""

    @abc.abstractmethod
    def log_only(self) -> contextlib.AbstractContextManager[TextIO]:
        """Yield a stream; what is printed to it in this context is in the log, and not on the console."""

    def shown_lines(self, *, final: bool = False) -> tuple[list[str], int]:
        """Return the new lines for the console, and how many before them were left out; see :meth:`LogTail.take`."""
        return [], 0


_output: Output | None = None
"""That of this process, once it goes to a log."""


def use(output: Output | None) -> None:
    """Let ``output`` be that of this process; None if its log has been closed."""
    global _output
    _output = output


def log_only() -> contextlib.AbstractContextManager[TextIO]:
    """Yield a stream; what is printed to it in this context is in the log of the rank, and not on the console."""
    return contextlib.nullcontext(sys.stderr) if _output is None else _output.log_only()


def print_error() -> None:
    """Print the traceback of the error that is handled to the log; the console is told of it elsewhere."""
    with log_only() as log:
        traceback.print_exc(file=log)


class RankOutput(Output):
    """Redirects the output of this process, including what C++ code and crashes write.

    A thread looks after the size of the log, because a file system that hangs must delay no thread that answers the
    driver.

    Args:
        masked: returns a stream that masks secrets in what Python code writes. The driver masks the rest when the run
            ends.
        most_bytes: the log continues in another part if it is larger.
        check_every_s: seconds between two looks.
    """

    def __init__(
        self,
        masked: Callable[[TextIO], TextIO],
        *,
        most_bytes: int = PART_BYTES,
        check_every_s: float = CHECK_EVERY_S,
    ):
        self._masked = masked
        self._most_bytes = most_bytes
        self._check_every_s = check_every_s
        self._log: Path | None = None
        self._tail = LogTail()
        self._lock = threading.RLock()

    def redirect(self, log: Path) -> None:
        with self._lock:
            use(self)
            log.parent.mkdir(parents=True, exist_ok=True)
            self._write_to(newest_part(log))
            enable_crash_reports()
            for name, number in (("stdout", 1), ("stderr", 2)):
                stream = os.fdopen(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
                setattr(sys, name, self._masked(stream))
            if self._log is None:
                threading.Thread(target=self._limit_parts, name="log-parts", daemon=True).start()
            self._log = log

    @contextlib.contextmanager
    def log_only(self) -> Iterator[TextIO]:
        with self._lock:
            self._tail.read()
            yield sys.stderr
            sys.stderr.flush()
            self._tail.skip()

    def shown_lines(self, *, final: bool = False) -> tuple[list[str], int]:
        with self._lock:
            return self._tail.take(final=final)

    def _write_to(self, path: Path) -> None:
        _write_to(path)
        self._tail.follow(path)

    def _limit_parts(self) -> None:
        while True:
            time.sleep(self._check_every_s)
            with self._lock, contextlib.suppress(OSError):  # a full disk: the log goes on where it is
                assert self._log is not None
                if os.fstat(2).st_size > self._most_bytes:
                    self._write_to(next_part(self._log))


def _write_to(path: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.write(2, log_header(os.getpid(), socket.gethostname()).encode())


_WAITS_IN = (
    *("/torch/distributed/", "/torch/autograd/", "/orchestrator/strategies/", "/orchestrator/state/transport.py"),
    *("/orchestrator/worker/control/rendezvous.py", "/orchestrator/compat/enqueue_gate.py"),
    *(f"/orchestrator/features/{module.parent.name}/" for module in features.paths("strategies.py")),
)
"""The innermost frame of a rank that waits for others is in a collective operation, in the backward pass, which
averages gradients, in a strategy that waits for a message or a lock, or in the wait before the first of these. The code
of a job is in none of these."""


def all_stacks(training_thread: int | None, *, flight: FlightRecord | None) -> Stacks:
    """Return the Python stacks of all threads, the training thread first.

    Args:
        training_thread: its identifier, as ``threading.get_ident`` returns it; None if it has not started.
        flight: what this process has enqueued with NCCL; None with gloo.
    """
    names = {t.ident: t.name for t in threading.enumerate()}
    frames = sys._current_frames()
    parts = []
    for ident in sorted(frames, key=lambda i: i != training_thread):
        role = "training thread" if ident == training_thread else f"thread {names.get(ident, ident)}"
        parts.append(f"{role}:\n{''.join(traceback.format_stack(frames[ident]))}")
    return Stacks(text="\n".join(parts), waiting=is_waiting(training_frame(training_thread)), flight=flight)


def training_frame(training_thread: int | None) -> FrameType | None:
    """Return the innermost frame of the training thread, given as for :func:`all_stacks`; None if it has none."""
    return None if training_thread is None else sys._current_frames().get(training_thread)


def is_waiting(frame: FrameType | None) -> bool:
    """Return whether a thread with this innermost frame seems to wait for other ranks."""
    return frame is not None and any(part in frame.f_code.co_filename for part in _WAITS_IN)


def flight_record_of(read: Callable[[], str], *, since_ns: int, world_size: int) -> FlightRecord | None:
    """Return what a rank has enqueued; None if the record cannot be read.

    Args:
        read: returns the dump of the flight recorder.
        since_ns: as for :func:`enqueued_in`, like ``world_size``.
    """
    try:
        dump = read()
        return FlightRecord(
            enqueued=enqueued_in(dump, since_ns=since_ns, world_size=world_size),
            dump=zlib.compress(dump.encode(), level=1),
        )
    except Exception:  # its format may change with torch
        print_error()
        return None
