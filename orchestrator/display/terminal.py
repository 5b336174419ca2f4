"""The terminal of a command, which may close before the command ends, and signs of life there."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any, TextIO, cast

_GONE = (errno.EIO, errno.EPIPE)
"""Errors of a write to a terminal that is closed, and to a pipe that nobody reads."""


class _LastingStream:
    """A text stream whose output is dropped when nobody can receive it any more."""

    def __init__(self, stream: IO[str]):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text`` and return its length."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered."""
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except OSError as e:
            if e.errno not in _GONE:
                raise
            with Path(os.devnull).open("w") as nowhere:  # which also takes what the buffer still holds
                os.dup2(nowhere.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def native_warnings_dropped() -> Iterator[None]:
    """Drop what this process writes to the file descriptor of stderr in this context, as libraries in C++ do."""
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Drop what is written to stdout and stderr in this context once nobody can receive it."""
    with contextlib.ExitStack() as stack:
        for redirect, stream in ((contextlib.redirect_stdout, sys.stdout), (contextlib.redirect_stderr, sys.stderr)):
            if isinstance(stream, io.TextIOWrapper):  # not that of a notebook
                lasting = _LastingStream(stream)
                stack.enter_context(redirect(cast(TextIO, lasting)))
                stack.callback(lasting.flush)  # the interpreter would do it as it exits, and fail
        yield


@contextlib.contextmanager
def closing_interrupts() -> Iterator[None]:
    """Let the end of the terminal raise :class:`KeyboardInterrupt` in this context, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the shell sends it as well as the terminal
        raise KeyboardInterrupt

    with lasting_output():
        before = signal.getsignal(signal.SIGHUP)
        if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():  # as below nohup
            yield
            return
        signal.signal(signal.SIGHUP, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, before)


LINE_EVERY_S = 10.0


@contextlib.contextmanager
def still_working(line: Callable[[], str], *, every_s: float = LINE_EVERY_S) -> Iterator[None]:
    """Print ``line()`` to standard error every ``every_s`` seconds during the block."""
    from orchestrator.display.plain_text import writable  # with rich, for which ``orchestrator --help`` need not wait

    ended = threading.Event()

    def work() -> None:
        while not ended.wait(every_s):
            print(writable(line(), sys.stderr), file=sys.stderr, flush=True)

    thread = threading.Thread(target=work, name="still working", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
