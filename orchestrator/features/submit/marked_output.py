"""The output of a command that runs as a job of Ray, whose log mixes stdout, stderr and lines of Ray's own.

The command marks each of its lines; the reader of the log writes them to its own stdout and stderr again.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import TextIO, cast

_OUT, _ERROR = "\x1eout ", "\x1eerr "
_RAY_INFO = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s+INFO \w+\.py:\d+ -- |Running entrypoint for job \S+: ")


class LineWriter:
    """A text stream that gives each whole line, without its end, to ``emit``."""

    def __init__(self, emit: Callable[[str], None]):
        self._emit = emit
        self._incomplete = ""

    def write(self, text: str) -> int:
        """Write ``text`` and return its length."""
        *lines, self._incomplete = (self._incomplete + text).split("\n")
        for line in lines:
            self._emit(line)
        return len(text)

    def flush(self) -> None:
        """Do nothing: each line is given away when it is complete."""

    def end(self) -> None:
        """Complete the last line."""
        if self._incomplete:
            self.write("\n")


class _MarkingWriter(LineWriter):
    """A text stream that writes its lines with a mark to the stream ``below``."""

    def __init__(self, mark: str, below: TextIO):
        super().__init__(lambda line: print(mark + line, file=below, flush=True))
        self.fileno = below.fileno
        """For :mod:`faulthandler`, which ``ray.init`` enables; lines that are written to it have no mark."""


@contextlib.contextmanager
def marked_output() -> Iterator[None]:
    """Mark what Python code writes to stdout and stderr in this context, and write both to stdout."""
    stdout = sys.stdout
    out, error = _MarkingWriter(_OUT, stdout), _MarkingWriter(_ERROR, stdout)
    try:
        with contextlib.redirect_stdout(cast(TextIO, out)), contextlib.redirect_stderr(cast(TextIO, error)):
            yield
    finally:
        out.end()
        error.end()


class JobLog(LineWriter):
    """A text stream for the log of a job, which writes it to stdout without the lines in which Ray informs."""

    def __init__(self) -> None:
        super().__init__(self._show)

    def _show(self, line: str) -> None:
        if not _RAY_INFO.match(line):
            print(line, file=sys.stdout, flush=True)


class MarkedLog(LineWriter):
    """A text stream for the log of a job, which writes the marked lines to stdout and stderr of this process.

    Lines without a mark, such as the traceback of a command that crashes, go to stderr.

    Attributes:
        preamble: the lines before the first mark. They are Ray's, or say why the command has not started.
        has_marks: whether there has been a mark.
    """

    def __init__(self) -> None:
        super().__init__(self._show)
        self.preamble: list[str] = []
        self.has_marks = False

    def _show(self, line: str) -> None:
        mark, text = line[: len(_OUT)], line[len(_OUT) :]
        if mark in (_OUT, _ERROR):
            self.has_marks = True
            print(text, file=sys.stdout if mark == _OUT else sys.stderr, flush=True)
        elif self.has_marks:
            print(line, file=sys.stderr, flush=True)
        else:
            self.preamble.append(line)
