"""What a process writes to its log when a signal such as SIGSEGV ends it: the Python stacks, then the C stack.

Three handlers of fatal signals are chained in the order in which the risk grows:

1. Ray's, which ends the process three seconds later in any case,
2. Python's ``faulthandler``, which writes the Python stacks and needs neither memory nor the interpreter lock,
3. the one of this module. It runs Python code in the thread that crashed, and so may wait for the interpreter lock or
   for a damaged heap until Ray's alarm.

torch has a handler as well. It is not used because it asks every thread for its stack and gives up at the first that
blocks signals, as some of Ray's threads do.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import signal

from orchestrator.records.rank_log import C_STACK

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


@ctypes.CFUNCTYPE(None, ctypes.c_int)  # type: ignore[untyped-decorator]
def _write_c_stack(number: int) -> None:
    _libc.signal(number, None)  # the default: another fault, or the end of this function, ends the process
    _libc.write(_STDERR, _title, len(_title))
    _libc.backtrace_symbols_fd(_frames, _libc.backtrace(_frames, _MAX_FRAMES), _STDERR)
    getattr(_libc, "raise")(number)


def enable() -> None:
    """Write crash reports to file descriptor 2, whatever it refers to when the process crashes."""
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
