"""What a script in Python runs before its own code: it tells what it has enqueued, what ends it, and its event files.

A thread tells what the script has enqueued, when it is asked.

No environment variable makes torch write the flight record of gloo, or of the NCCL backend of torch 2.15, at a signal
from outside. Python imports a module of this name at its start. It takes its directory off the path again, and lets
Python import the user's or the system's module of the same name, so that the script and its child processes see no
difference. The thread sleeps in ``accept``, and is unknown to ``threading``. It answers while the
main thread waits in torch, which releases the interpreter lock there.

Measured: 10 ms at the start of a script without torch, which imports the same modules; 17 ms of CPU time for an answer
with 1,000 operations; and 1 to 2 microseconds for each operation that torch records.

The output of a script does not tell which of its tracebacks has ended it: others were handled. Python calls
``sys.excepthook`` with that one alone, so that it is written to a file there.

The writers of TensorBoard open their file for a moment at each flush, so that nobody finds it among the open ones. An
audit hook, which Python calls at each ``open``, writes the names to a file.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import runpy
import socket
import sys
from pathlib import Path
from types import TracebackType

RECORD_VARIABLE = "ORCHESTRATOR_RECORD"
"""The path of the socket on which the script answers."""
UNCAUGHT = "uncaught.json"
"""The file beside that socket with the message and the traceback of the exception that has ended the script."""
EVENT_FILES = "event-files"
"""The file beside that socket with the paths of the event files of TensorBoard that the script writes, a line each."""
_WRITES = os.O_WRONLY | os.O_RDWR
_BACKENDS = Path(__file__).parents[3] / "compat" / "backends.py"


def _answer(listener: socket.socket) -> None:
    """Send the flight record of the script, as JSON, to everyone who connects; an empty one if it has no group."""
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(Exception):  # no record, which the script must not notice
            connection.sendall(_record().encode())


def _record() -> str:
    if (distributed := sys.modules.get("torch.distributed")) is None:
        return "{}"
    record: str = runpy.run_path(str(_BACKENDS))["flight_record"](distributed.group.WORLD)
    return record


def _note_uncaught(file: Path) -> None:
    hook, pid = sys.excepthook, os.getpid()

    def noted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):
            if os.getpid() == pid:  # not in a fork
                import json
                import traceback

                text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
                message = "".join(traceback.TracebackException(kind, error, None).format_exception_only())
                file.write_text(json.dumps({"message": message, "traceback": text}))
        hook(kind, error, trace)

    sys.excepthook = noted


def _note_event_files(file: Path) -> None:
    seen = set()

    def noted(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and "tfevents" in str(arguments[0]) and arguments[0] not in seen:
            path, _, flags = arguments
            if isinstance(path, str | bytes) and isinstance(flags, int) and flags & _WRITES:
                seen.add(path)
                with contextlib.suppress(OSError), file.open("a") as paths:
                    paths.write(f"{os.path.abspath(os.fsdecode(path))}\n")  # noqa: PTH100, not only of texts

    sys.addaudithook(noted)


if __name__ == "sitecustomize":
    here, _, rest = os.environ.pop("PYTHONPATH").partition(os.pathsep)
    sys.path.remove(here)
    if rest:
        os.environ["PYTHONPATH"] = rest
    listener = socket.socket(socket.AF_UNIX)
    record = os.environ.pop(RECORD_VARIABLE)
    listener.bind(record)
    listener.listen()
    _thread.start_new_thread(_answer, (listener,))
    _note_uncaught(Path(record).with_name(UNCAUGHT))
    _note_event_files(Path(record).with_name(EVENT_FILES))
    del sys.modules[__name__]
    __import__(__name__)  # Python goes on if there is no other
