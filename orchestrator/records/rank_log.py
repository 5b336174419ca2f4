"""The log of a rank: its parts, its last lines, and the report of a process that crashed.

A log continues in another part when one has become large: ``rank-0.log``, ``rank-0.1.log``, ``rank-0.2.log``, ... No
part is ever renamed, so that readers keep their place and the upload of a large part is not repeated. Only the newest
part is searched here, and only the end of what its last process wrote is decoded.
"""

from __future__ import annotations

import itertools
import mmap
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.records.run_dir import RunDir, files_below

PART_BYTES = 64 * 2**20
"""A process that finds its log to be larger continues in another part."""
_TAIL_BYTES, _TAIL_LINES = 2**20, 20
"""More than a crash report, which ends what a process writes."""
_PART = re.compile(r"rank-(?P<rank>\d+)(?:\.(?P<part>\d+))?\.log")

_CRASH = "Fatal Python error: "
"""What faulthandler writes to the log of a crashing process (SIGSEGV, SIGABRT, ...) before the stacks."""
_CRASH_OR_SIGNAL = re.compile(rf"^({_CRASH}|\*\*\* SIG[A-Z]+ received at time=)", re.MULTILINE)
"""The beginning of a crash: Ray's handler may write before faulthandler."""
_CURRENT_THREAD = re.compile(r"^Current thread .*\n(?:  .*\n)*", re.MULTILINE)
C_STACK = "C stack (most recent call first):\n"
"""The line before the C stack of the thread that crashed; ``backtrace_symbols_fd`` writes a line for each function."""
_C_FUNCTION = re.compile(r"\S+\(\S*\) ?\[0x[0-9a-f]+\]")
_PROCESS = "worker process "
_HEADER = re.compile(rb"worker process (\d+) on .*\n")
_LINES_BEFORE_CRASH = 3
_MAX_FRAMES = 40


def log_header(pid: int, hostname: str) -> str:
    """Return the line with which a process begins to write to the log of its rank."""
    return f"{_PROCESS}{pid} on {hostname}\n"


def rank_and_part(name: str) -> tuple[int, int] | None:
    """Return the rank and the number of the part, from 0, of the log file ``name``; None if it is not a log."""
    match = _PART.fullmatch(name)
    return None if match is None else (int(match["rank"]), int(match["part"] or 0))


def newest_part(log: Path) -> Path:
    """Return the next part of the log that begins with the file ``log``, which need not exist."""
    parts = [found for path in log.parent.glob(f"{log.stem}.*log") if (found := rank_and_part(path.name)) is not None]
    return _part(log, max((part for _, part in parts), default=0))


def next_part(log: Path) -> Path:
    """Return the part after the newest one."""
    found = rank_and_part(newest_part(log).name)
    assert found is not None
    return _part(log, found[1] + 1)


def log_tail(log: Path) -> str:
    """Return the last lines of a log, or the crash report of the last process that wrote to it.

    The result is empty if the log cannot be read on this host.
    """
    _, text = _last_output(newest_part(log))
    return _crash_report(text) or "\n".join(text.splitlines()[-_TAIL_LINES:])


def crash_report(log: Path, pid: int) -> str:
    """Return what process ``pid`` wrote to its log as a signal such as SIGSEGV ended it; empty if nothing.

    A report has the lines before the crash, in which C libraries say why they abort, and the Python stack and the C
    stack of the thread that crashed.
    """
    last_pid, text = _last_output(newest_part(log))
    return _crash_report(text) if last_pid == pid else ""


def _part(log: Path, number: int) -> Path:
    return log.with_name(f"{log.stem}.{number}.log") if number else log


def _last_output(path: Path) -> tuple[int | None, str]:
    """Return the id of the last process that wrote to a file and the end of what it wrote, without its header.

    The id is None if the file has no header.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _last_header(data)
            begin = max(len(data) - _TAIL_BYTES, 0 if header is None else header.end())
            return None if header is None else int(header[1]), data[begin:].decode(errors="replace")
    except (OSError, ValueError):  # ValueError: the file is empty
        return None, ""


def _last_header(data: mmap.mmap) -> re.Match[bytes] | None:
    end = len(data)
    while (at := data.rfind(_PROCESS.encode(), 0, end)) >= 0:
        if (at == 0 or data[at - 1] == ord("\n")) and (header := _HEADER.match(data, at)) is not None:
            return header
        end = at
    return None


def _crash_report(written: str) -> str:
    crash = written.find(_CRASH)
    if crash < 0:
        return ""
    begin = _CRASH_OR_SIGNAL.search(written)
    before = written[: begin.start() if begin else crash].splitlines()[-_LINES_BEFORE_CRASH:]
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


@dataclass(frozen=True)
class LogLine:
    """A line that ``rank`` has written, without its line break."""

    rank: int
    text: str


class LogReader:
    """Returns the lines that have been added to the logs of a run, rank by rank.

    Logs of several nodes are in directories below ``logs/``.

    Attributes:
        ranks: the ranks to read; empty for all.
    """

    def __init__(self, run_dir: RunDir, ranks: Collection[int] = ()):
        self._folder = run_dir.logs
        self._ranks = ranks
        self._offsets: dict[str, int] = {}

    @property
    def has_read(self) -> bool:
        """Whether any line has been read."""
        return any(self._offsets.values())

    def move_to(self, run_dir: RunDir) -> None:
        """Continue with another directory of the same run, which has the same logs."""
        self._folder = run_dir.logs

    def ranks(self) -> list[int]:
        """Return the ranks that have a log."""
        return sorted({rank for rank, _ in self._files()})

    def read(self, *, complete: bool = True) -> Iterator[LogLine]:
        """Yield the new lines; a last one without a line break only if the logs are ``complete``."""
        for rank, file in self._files():
            yield from self._new_lines(rank, file, complete)

    def _files(self) -> list[tuple[int, Path]]:
        found = [(*number, path) for path in files_below(self._folder) if (number := rank_and_part(path.name))]
        found.sort(key=lambda file: (file[0], file[2].parent, file[1]))
        return [(rank, path) for rank, _, path in found if not self._ranks or rank in self._ranks]

    def _new_lines(self, rank: int, file: Path, complete: bool) -> Iterator[LogLine]:
        name = str(file.relative_to(self._folder))
        with file.open("rb") as log:
            log.seek(self._offsets.get(name, 0))
            for line in log:
                if not complete and not line.endswith(b"\n"):
                    break
                self._offsets[name] = log.tell()
                yield from (LogLine(rank, text) for text in line.decode(errors="replace").splitlines())
