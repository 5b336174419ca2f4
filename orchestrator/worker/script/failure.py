"""Why a script has failed, from its exit code and the end of its output. Pure."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

from orchestrator.protocol.messages import Failure

_TRACEBACK = "Traceback (most recent call last):"
_IGNORED = re.compile(r"Exception ignored [^\n]*\n\Z")
"""What stands before the traceback of an exception that does not end a process."""
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_CONNECTION_LOST = re.compile(
    r"[Cc]onnection (closed|reset) by (remote )?peer|Broken pipe|remote process exited|DistNetworkError"
)


def last_traceback(output: str) -> str:
    """Return the traceback of the exception that has ended a script; empty if its ``output`` has none."""
    begin = len(output)
    while (begin := output.rfind(_TRACEBACK, 0, begin)) >= 0:
        if not _IGNORED.search(output, 0, begin):
            break
    if begin < 0:
        return ""
    lines = output[begin:].splitlines()
    last = next((i for i, line in enumerate(lines[1:], 1) if line and not line.startswith(" ")), len(lines) - 1)
    return "\n".join(lines[: last + 1])


def script_failure(
    exit_code: int, output: str, *, error_file: str, log_tail: str, time: float, after_end: bool
) -> Failure:
    """Describe the end of a script.

    Args:
        exit_code: negative for a signal; not 0.
        output: the end of what it has printed.
        error_file: what torch's ``record`` has written; empty if nothing.
        log_tail: the last lines of the log of its rank.
        time: when it ended, in seconds since the epoch.
        after_end: whether this worker has ended it because of another rank.
    """
    message, traceback = _recorded(error_file)
    traceback = traceback or last_traceback(output)
    message = message or traceback.rpartition("\n")[2] or _without_traceback(exit_code, output)
    if _PORT_TAKEN.search(message):
        message += "; the script opens a port of its own that another program has: let it use MASTER_PORT, or port 0"
    return Failure(
        message=message,
        traceback=traceback,
        time=time,
        collateral=after_end or bool(_CONNECTION_LOST.search(message)),
        log_tail="" if traceback else log_tail,
    )


def _recorded(error_file: str) -> tuple[str, str]:
    """Return the message and the traceback in the file of torch's ``record``; both empty if it has none."""
    try:
        message: Any = json.loads(error_file)["message"]
        if isinstance(message, str):
            return message, ""
        return str(message["message"]), str(message["extraInfo"]["py_callstack"]).rstrip()
    except (ValueError, LookupError, TypeError):
        return "", ""


def _without_traceback(exit_code: int, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = f": {lines[-1]}" if lines else ""
    if exit_code > 0:
        return f"the script ended with exit code {exit_code}{said}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"the script was ended by {name}{said}"
