"""Errors in what the user has given, where in the user's code one was raised, and calls that would end the process.

``sys.exit()`` in a method of a job, a dataset or an imported module would end the driver or a worker without a word,
with the exit code of a success.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import os
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn


class ConfigError(ValueError):
    """The configuration or the plan is wrong. ``errors`` holds one line per error, duplicates removed."""

    def __init__(self, errors: Iterable[str]):
        self.errors = tuple(dict.fromkeys(errors))
        super().__init__(self.errors)

    def __str__(self) -> str:
        return "\n".join(self.errors)


class JobError(ConfigError):
    """The code of the job does what it must not."""

    def __init__(self, error: str):
        super().__init__([error])
        self.args = (error,)  # as pickle calls the class


_OWN_FILES = f"{Path(__file__).resolve().parents[1]}/"
_LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")), "<frozen ", "<string>")
_PACKAGES = ("/site-packages/", "/dist-packages/")
"""What the paths of installed packages contain, also of another environment that this one builds on."""


_end_process = os._exit
_refusing = threading.local()
"""``pid``: the process in which this thread refuses calls of ``os._exit``, if it does."""


@contextlib.contextmanager
def exits_refused(*, hard: bool = False) -> Iterator[None]:
    """Call code of the user in this context to turn an attempt to end the process into a :class:`JobError`.

    What comes from this package or from a signal, such as Ctrl-C, passes.

    Args:
        hard: whether to refuse ``os._exit`` too, if this thread calls it. On a worker, it passes: the driver takes the
            worker for lost and says so. Nobody watches the driver.
    """
    try:
        with _hard_exits_refused() if hard else contextlib.nullcontext():
            yield
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as e:
        if (text := _exit_text(e)) is None:
            raise
        raise JobError(text) from e


class _HardExit(SystemExit):
    """A call of ``os._exit``."""


@contextlib.contextmanager
def _hard_exits_refused() -> Iterator[None]:
    before = getattr(_refusing, "pid", None)
    _refusing.pid = os.getpid()  # in a fork, the exit passes
    os._exit = _exit
    try:
        yield
    finally:
        _refusing.pid = before


def _exit(status: int) -> NoReturn:
    """Stand in for ``os._exit``, which runs no code that could say what ended the process."""
    frame = inspect.currentframe()
    caller = frame.f_back.f_code.co_filename if frame is not None and frame.f_back is not None else _OWN_FILES
    if getattr(_refusing, "pid", None) == os.getpid() and not caller.startswith((_OWN_FILES, *_LIBRARIES)):
        raise _HardExit(status)
    _end_process(status)


def user_frames(error: BaseException) -> list[TracebackType]:
    """Return the entries of the traceback below the last call of this package, without those of libraries.

    If all are of libraries, these; empty if this package itself has raised the error.
    """
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        code = entry.tb_frame.f_code
        if code is not _exit.__code__:
            entries = [] if code.co_filename.startswith(_OWN_FILES) else [*entries, entry]
        entry = entry.tb_next
    return [e for e in entries if not _is_of_library(_file_of(e))] or entries


def own_frames(error: BaseException) -> list[TracebackType]:
    """Return the entries of the traceback that are of the user's files, also above calls of this package."""
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        if is_of_user(_file_of(entry)):
            entries.append(entry)
        entry = entry.tb_next
    return entries


def is_of_user(file: str) -> bool:
    """Return whether a file of code is neither of this package nor of a library."""
    return not (_is_of_library(file) or file.startswith(_OWN_FILES))


def _file_of(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _is_of_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or any(part in file for part in _PACKAGES)


def is_own_error(error: BaseException) -> bool:
    """Return whether code of this package has raised the error itself."""
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    return entry is not None and entry.tb_frame.f_code.co_filename.startswith(_OWN_FILES)


def error_text(error: BaseException) -> str:
    """Return the type and the text of an error; the text alone if it says what to change."""
    if isinstance(error, JobError):
        return str(error)
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as e:  # its own method
        return f"{type(error).__name__}, whose text cannot be read, because its __str__ raises {type(e).__name__}"


def readable(error: BaseException) -> BaseException:
    """Return the error, or one from the same place with a text if its own cannot be read."""
    try:
        str(error)
    except Exception:
        return RuntimeError(error_text(error)).with_traceback(error.__traceback__)
    return error


def place_of(entry: TracebackType) -> str:
    """Return the file and the line of an entry of a traceback."""
    return f"{Path(entry.tb_frame.f_code.co_filename).name}, line {entry.tb_lineno}"


def _exit_text(error: BaseException) -> str | None:
    """Return which code has ended the process by ``error``; None if it was not the user's, or a signal."""
    frames = user_frames(error)
    if not frames or not (isinstance(error, SystemExit) or _is_raised(error)):
        return None
    called, code = frames[0].tb_frame.f_globals.get("__name__"), frames[0].tb_frame.f_code
    does = f"raises {type(error).__name__}"
    if isinstance(error, SystemExit):
        function = "os._exit" if isinstance(error, _HardExit) else "sys.exit"
        does = f"calls {function}({'' if error.code is None else repr(error.code)})"
    what = f"{code.co_qualname} {does} ({place_of(frames[-1])}), which would end the process without a reason"
    if code.co_name == "<module>":
        return f"importing {called} {does} ({place_of(frames[-1])}); put it below `if __name__ == '__main__':`"
    return f"{what}; raise an exception that says what is wrong"


def _is_raised(error: BaseException) -> bool:
    """Return whether a statement has raised ``error``; a signal, or the end of a generator, interrupts any other."""
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    return entry is not None and entry.tb_frame.f_code.co_code[entry.tb_lasti] == dis.opmap["RAISE_VARARGS"]
