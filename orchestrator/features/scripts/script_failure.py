"""Why a script has ended: from its exit code, the exception that has ended it, and the end of its output."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

from orchestrator.policy.failure import describe_crash
from orchestrator.protocol.messages import Failure
from orchestrator.user_code.own_errors import own_error_in

LONGEST_MESSAGE = 1000
_TRACEBACK = re.compile(r"^( *\+ Exception Group )?Traceback \(most recent call last\):$", re.MULTILINE)
_HARMLESS = re.compile(r"(Exception ignored|Exception in thread|Process [^\n]*:$)[^\n]*\n\Z", re.MULTILINE)
"""What stands before the traceback of an exception that does not end a process."""
_CRASH = re.compile(r"^(Fatal Python error: |\*\*\* SIG[A-Z]+ received at time=)", re.MULTILINE)
_TERMINATED = re.compile(r"^terminate called (?:after throwing an instance of '([^'\n]*)'|[^\n]*)", re.MULTILINE)
_WHAT = re.compile(r"^\s*what\(\):\s*([^\n]*)", re.MULTILINE)
_OF_GROUP = re.compile(r"^  \| (?!  )(\S[^\n]*)", re.MULTILINE)
_SYNTAX = re.compile(r"\w*(Syntax|Indentation|Tab)Error\b")
_CHILD = re.compile(r"^  rank +: (\d+) .*?^  exitcode +: (-?\d+) ", re.MULTILINE | re.DOTALL)
"""The first failure in what torchrun says of its processes."""
_CHILD_FAILED = "ChildFailedError"
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_OTHER_RANK = re.compile(
    r"[Cc]onnection (closed|reset) by (remote )?peer|Broken pipe|remote process exited|DistNetworkError"
    r"|[Tt]imed out waiting \d+ ?ms|[Ww]ait timeout after|collective operation timeout|failed to pass monitoredBarrier"
    r"|pair closure|DistStoreError"
)
"""What a rank raises because another one has ended, or is not there in time."""
_STOPPED = re.compile(r"^KeyboardInterrupt|got signal: (2|15)$")
"""What a script raises that takes SIGTERM for an order to end."""
_CRASHES_AT_EXIT = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
"""What Python may end with after an exception, when it takes down threads of a group that others have left."""
STOP_CODES = (0, -signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT)


def script_failure(
    exit_code: int,
    output: str,
    *,
    error_file: str,
    log_tail: str,
    time: float,
    after_end: bool,
    uncaught: str | None = None,
    oom_kill: bool = False,
) -> Failure:
    """Describe the end of a script.

    Args:
        exit_code: negative for a signal; not 0.
        output: the end of what it has printed.
        error_file: what torch's ``record`` has written; empty if nothing.
        log_tail: the last lines of the log of its rank.
        time: when it ended, in seconds since the epoch.
        after_end: whether this worker has ended it because of another rank.
        uncaught: what ``at_start/sitecustomize.py`` has written; empty if nothing, None if it is not there.
        oom_kill: whether the out-of-memory killer of the kernel was at work meanwhile.
    """
    told = _recorded(error_file) or _noted(uncaught)
    message, traceback = told or _printed(exit_code, output, certain=uncaught is None)
    if message:
        message = _cause(message, output)
        if exit_code < 0 and exit_code != -signal.SIGINT and not (told and -exit_code in _CRASHES_AT_EXIT):
            message += f", then it was ended by {_signal(exit_code)}"
    else:
        message = _without_exception(exit_code, output, oom_kill=oom_kill)
    if _PORT_TAKEN.search(message):
        message += "; the script opens a port of its own that another program has: let it use MASTER_PORT, or port 0"
    own = own_error_in(traceback)
    message = message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]}..."
    return Failure(
        message=message if own is None else f"{message} ({own.place})",
        traceback=traceback,
        time=time,
        collateral=after_end or bool(_OTHER_RANK.search(message)),
        log_tail="" if traceback else log_tail,
        own_frames="" if own is None else own.frames,
    )


def why_not_stopped(failure: Failure) -> str | None:
    """Return what went wrong in a script that was asked to stop; None if its end was what SIGTERM asks for."""
    return None if _STOPPED.search(failure.message) else failure.message


def last_traceback(output: str) -> str:
    """Return the traceback of the last exception that may have ended a script; empty if its ``output`` has none."""
    return _last_traceback(output)[0]


def _last_traceback(output: str) -> tuple[str, str]:
    """Return the last traceback, up to the first line of the message, and what was printed after it."""
    for begin in reversed([match.start() for match in _TRACEBACK.finditer(output)]):
        if _HARMLESS.search(output, 0, begin):
            continue
        lines = output[begin:].splitlines()
        if lines[0].startswith(" "):  # a group, with a margin
            end = next((i for i, line in enumerate(lines) if not line.startswith(" ")), len(lines))
        else:
            end = next((i for i, line in enumerate(lines[1:], 1) if line and not line.startswith(" ")), len(lines)) + 1
        return "\n".join(lines[:end]), "\n".join(lines[end:])
    return "", ""


def _message(traceback: str) -> str:
    """Return the type and the message of the exception in a printed traceback."""
    if traceback.startswith(" ") and (found := _OF_GROUP.search(traceback)) is not None:
        return found[1]
    return traceback.rpartition("\n")[2]


def _recorded(error_file: str) -> tuple[str, str] | None:
    """Return the message and the traceback in the file of torch's ``record``; None if it has none."""
    try:
        message: Any = json.loads(error_file)["message"]
        if isinstance(message, str):
            return (message, "") if message else None
        return str(message["message"]), str(message["extraInfo"]["py_callstack"]).rstrip()
    except (ValueError, LookupError, TypeError):
        return None


def _noted(uncaught: str | None) -> tuple[str, str] | None:
    try:
        found = json.loads(uncaught or "")
        return str(found["message"]), str(found["traceback"])
    except (ValueError, LookupError, TypeError):
        return None


def _printed(exit_code: int, output: str, *, certain: bool) -> tuple[str, str]:
    """Return the exception that has most likely ended a script, by what it has printed; both empty if none has.

    One that was handled is followed by other output. After one that has ended Python, which has exit code 1 then,
    others may still print.

    Args:
        exit_code: of the script.
        output: the end of what it has printed.
        certain: whether nothing else would know of such an exception.
    """
    traceback, after = _last_traceback(output)
    is_last = not _TERMINATED.split(_CRASH.split(after)[0])[0].strip()
    if traceback and ((exit_code == 1 and certain) or is_last):
        return _message(traceback), traceback
    return "", ""


def _cause(message: str, output: str) -> str:
    """Return the first line of an exception's text, with the error that it passes on, as that of a child process."""
    lines = [line.strip() for line in message.strip().splitlines()]
    if lines[0].startswith("File "):  # of a SyntaxError, which shows the place first
        lines = [line for line in lines if _SYNTAX.match(line)] or lines
    first, last = lines[0], lines[-1]
    if _CHILD_FAILED in first:
        return _of_child(first, output)
    if any(line.endswith("Traceback (most recent call last):") for line in lines) and last != first:
        return f"{first.removesuffix(':')}: {last}"
    return first if not first.endswith(":") or len(lines) == 1 else " ".join([first, *filter(None, lines[1:2])])


def _of_child(first: str, output: str) -> str:
    """Return which process of torchrun has failed, and by which of the exceptions before torchrun's own."""
    name = first.rpartition(".")[2].removesuffix(":").strip()
    if (child := _CHILD.search(output)) is None:
        return name
    code = int(child[2])
    before, _, _ = output.partition(_CHILD_FAILED)
    before = before[: before.rfind("Traceback (most recent call last):")]
    said = _message(last_traceback(before)) if code == 1 else ""
    how = f"was ended by {_signal(code)}" if code < 0 else f"ended with exit code {code}"
    return f"{name}: its rank {child[1]} {how}" + (f": {said}" if said else "")


def _without_exception(exit_code: int, output: str, *, oom_kill: bool) -> str:
    before = _CRASH.split(output)[0]
    lines = [line.strip() for line in before.splitlines() if line.strip()]
    said = f": {lines[-1]}" if lines else ""
    if exit_code > 0:
        return f"the script ended with exit code {exit_code}{said}"
    if (terminated := _TERMINATED.search(before)) is not None:
        what = _WHAT.search(before, terminated.start())
        said = ": " + ": ".join(filter(None, (terminated[1] or terminated[0], what and what[1])))
    crash = _CRASH.search(output)
    if crash is not None and (where := describe_crash(output[crash.start() :]).partition(" in ")[2]):
        said = f" in {where}{said}"
    if exit_code == -signal.SIGKILL and oom_kill:
        said += "; the kernel's out-of-memory killer ended a process on this node during this time, probably this one"
    return f"the script was ended by {_signal(exit_code)}{said}"


def _signal(exit_code: int) -> str:
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
