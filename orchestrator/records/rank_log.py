"""The log of a rank: its last lines, and the report of a process that crashed."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

_CRASH = "Fatal Python error: "
"""What faulthandler writes to the log of a crashing process (SIGSEGV, SIGABRT, ...) before the stacks."""
_CRASH_OR_SIGNAL = re.compile(rf"^({_CRASH}|\*\*\* SIG[A-Z]+ received at time=)", re.MULTILINE)
"""The beginning of a crash: Ray's handler may write before faulthandler."""
_CURRENT_THREAD = re.compile(r"^Current thread .*\n(?:  .*\n)*", re.MULTILINE)
C_STACK = "C stack (most recent call first):\n"
"""The line before the C stack of the thread that crashed; ``backtrace_symbols_fd`` writes a line for each function."""
_C_FUNCTION = re.compile(r"\S+\(\S*\) ?\[0x[0-9a-f]+\]")
_PROCESS = "worker process "
_LINES_BEFORE_CRASH = 3
_MAX_FRAMES = 40


def log_header(pid: int, hostname: str) -> str:
    """Return the line with which a process begins to write to the log of its rank."""
    return f"{_PROCESS}{pid} on {hostname}\n"


def log_tail(path: Path, lines: int = 20) -> str:
    """Return the last lines of a log, or the crash report of the last process that wrote to it.

    The result is empty if the log cannot be read on this host.
    """
    text = _read_log(path)
    return _crash_report(text) or "\n".join(text.splitlines()[-lines:])


def crash_report(path: Path, pid: int) -> str:
    """Return what process ``pid`` wrote to its log as a signal such as SIGSEGV ended it; empty if nothing.

    A report has the lines before the crash, in which C libraries say why they abort, and the Python stack and the C
    stack of the thread that crashed.
    """
    text = _read_log(path)
    return _crash_report(text) if _last_process(text).startswith(f"{pid} on ") else ""


def _read_log(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _last_process(log: str) -> str:
    """Return what the last process has written, from its number on; everything if the log has no header."""
    return re.split(rf"^{_PROCESS}(?=\d+ on )", log, flags=re.MULTILINE)[-1]


def _crash_report(log: str) -> str:
    written = _last_process(log)
    crash = written.find(_CRASH)
    if crash < 0:
        return ""
    begin = _CRASH_OR_SIGNAL.search(written)
    before = written[: begin.start() if begin else crash].splitlines()[1:][-_LINES_BEFORE_CRASH:]
    errors = [line for line in written[crash:].splitlines() if line.startswith(_CRASH)]
    python = _CURRENT_THREAD.search(written, crash)
    c_stack = _without_handlers(written[crash:].partition(C_STACK)[2].splitlines())
    return "\n".join(
        [
            *before,
            *errors,
            *(python[0].splitlines()[:_MAX_FRAMES] if python else ()),
            *((C_STACK.strip(), *(f"  {function}" for function in c_stack[:_MAX_FRAMES])) if c_stack else ()),
        ]
    )


def _without_handlers(lines: list[str]) -> list[str]:
    """Return the functions of a C stack below the handlers of the signal.

    The handlers are chained, so the function of the C library by which a handler is called stands there repeatedly.
    """
    functions = list(itertools.takewhile(_C_FUNCTION.fullmatch, lines))
    repeated = (f for f in functions if "libc.so" in f and functions.count(f) > 1)
    trampoline = next(repeated, None)
    if trampoline is None:
        return functions
    return functions[len(functions) - functions[::-1].index(trampoline) :]
