"""What ``breakpoint()`` does in a process without a terminal, and where a debugger holds a process.

Imports only the standard library, because a script of the user imports it at its first ``breakpoint()``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from orchestrator.user_code.errors import JobError

VARIABLE = "PYTHONBREAKPOINT"
"""The environment variable by which Python finds what ``breakpoint()`` calls. Ray sets it in its processes."""
REFUSAL = f"{__name__}.refuse"
"""The value of it for :func:`refuse`."""

_DEBUGGERS = ("pdb", "bdb", "ipdb", "debugpy", "pydevd", "_pydevd_bundle", "remote_pdb", "web_pdb", "rpdb", "pudb")
_PARTS_OF_LIBRARIES = ("IPython.terminal.debugger", "IPython.core.debugger", "ray.util.rpdb", "ray.util.debugpy")
_THEIR_WAITS = ("cmd", "code", "selectors", "socket", "socketserver", "threading")
"""Modules of the standard library in which a debugger waits for its user."""


def refuse(*_arguments: Any, **_settings: Any) -> NoReturn:
    """Stand in for ``breakpoint()``, which would wait for a terminal that the process does not have.

    Raises:
        JobError: always, with the place of the call.
    """
    raise JobError(no_terminal(f"breakpoint() at {place(sys._getframe(1))}"))


def no_terminal(what: str) -> str:
    """Return the error about a debugger, ``what`` and where, in a process that has no terminal."""
    return f"{what}: this process has no terminal; add debug=true to stop there, or set {VARIABLE}=0 to ignore it"


def place(frame: FrameType) -> str:
    """Return the file and the line that ``frame`` executes."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def held_at(frame: FrameType | None) -> str | None:
    """Return the place in the code of the user at which a debugger holds a thread; None if none does.

    Args:
        frame: the innermost frame of the thread; None if it has none.
    """
    held = False
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] in _DEBUGGERS or module in _PARTS_OF_LIBRARIES:
            held = True
        elif module not in _THEIR_WAITS:
            return place(frame) if held else None
        frame = frame.f_back
    return None
