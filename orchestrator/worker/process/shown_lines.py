"""The lines of a log that the console shows: what the rank has printed, however it did so, and not too much of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

MOST_CHARACTERS = 500
"""A longer line is cut."""
BAR_EVERY_S = 10.0
"""How often a line is shown that is drawn again and again, such as a progress bar, until it ends."""
BURST, LINES_PER_S = 50, 5
TELL_EVERY_S = 5.0
_CHUNK_BYTES = 1 << 20


class LogTail:
    """Follows the file to which a process writes: Python and C++ code of it, loader processes and other programs.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._file: BinaryIO | None = None
        self._rest = b""
        self._lines: list[str] = []
        self._num_skipped = 0
        self._bar = b""
        self._bar_due = 0.0

    def follow(self, path: Path) -> None:
        """Continue at the end of another file, after what the present one has."""
        self.read()
        if self._file is not None:
            self._file.close()
        self._file = path.open("rb")
        self.skip()

    def skip(self) -> None:
        """Leave out what has been written since the last :meth:`read`."""
        if self._file is not None:
            self._file.seek(0, 2)

    def read(self) -> None:
        """Read what has been written."""
        while self._file is not None and (chunk := self._file.read(_CHUNK_BYTES)):
            if len(chunk) == _CHUNK_BYTES:  # the lines before were too many to show
                self._num_skipped += len(self._lines)
                self._lines = []
            *complete, self._rest = (self._rest + chunk).split(b"\n")
            self._rest = self._rest[-_CHUNK_BYTES:]
            self._lines += filter(None, map(_text, complete))

    def take(self, *, final: bool = False) -> tuple[list[str], int]:
        """Return the new lines, and how many before them were left out; a last one without an end if it is ``final``.

        A line that is drawn again and again is returned now and then.
        """
        self.read()
        lines, self._lines = self._lines, []
        skipped, self._num_skipped = self._num_skipped, 0
        now = self._clock()
        if final:
            lines += filter(None, [_text(self._rest)])
            self._rest = b""
        elif b"\r" in self._rest and self._rest != self._bar and now >= self._bar_due:
            self._bar, self._bar_due = self._rest, now + BAR_EVERY_S
            lines += filter(None, [_text(self._rest)])
        return lines, skipped


class LineLimit:
    """Lets through so many lines at once, and so many in a second. Of more, the last ones.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._allowed = float(BURST)
        self._at = clock()
        self._num_left_out = 0
        self._told_at = -TELL_EVERY_S

    def take(self, lines: Sequence[str], *, left_out: int = 0, log: str, final: bool = False) -> tuple[str, ...]:
        """Return the lines to show, and now and then how many others are only in the ``log``.

        Args:
            left_out: how many have been left out before.
            log: where all lines are.
            final: whether no further lines follow.
        """
        now = self._clock()
        self._allowed = min(BURST, self._allowed + LINES_PER_S * (now - self._at))
        self._at = now
        kept = tuple(lines[max(0, len(lines) - int(self._allowed)) :])
        self._allowed -= len(kept)
        self._num_left_out += left_out + len(lines) - len(kept)
        if not self._num_left_out or not (final or now >= self._told_at + TELL_EVERY_S):
            return kept
        told = f"({self._num_left_out:,} lines are only in {log})"
        self._num_left_out, self._told_at = 0, now
        return (told, *kept)


def _text(line: bytes) -> str:
    """Return what a terminal would show of a line at last, without white space at its end."""
    text = line.rstrip().rpartition(b"\r")[2].decode(errors="replace")
    more = len(text) - MOST_CHARACTERS
    return text if more <= 0 else f"{text[:MOST_CHARACTERS]}... ({more:,} more characters)"
