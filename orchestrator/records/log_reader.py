"""Reading the logs of a run's ranks while they grow."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from orchestrator.records.listing import files_below
from orchestrator.records.run_dir import RunDir

_RANK = re.compile(r"rank-(\d+)\.log")


@dataclass(frozen=True)
class LogLine:
    """A line that ``rank`` has written, without its line break."""

    rank: int
    text: str


class LogReader:
    """Returns the lines that have been added to the logs of a run, rank by rank.

    ``ranks``: the ranks to read; empty for all. Logs of several nodes are in directories below ``logs/``.
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

    def read(self, *, complete: bool = True) -> list[LogLine]:
        """Return the new lines; a last one without a line break only if the logs are ``complete``."""
        return [line for rank, file in self._files() for line in self._new_lines(rank, file, complete)]

    def _files(self) -> list[tuple[int, Path]]:
        found = [(int(match[1]), p) for p in files_below(self._folder) if (match := _RANK.fullmatch(p.name))]
        return sorted((rank, path) for rank, path in found if not self._ranks or rank in self._ranks)

    def _new_lines(self, rank: int, file: Path, complete: bool) -> list[LogLine]:
        name = str(file.relative_to(self._folder))
        offset = self._offsets.get(name, 0)
        with file.open("rb") as log:
            log.seek(offset)
            data = log.read()
        if not complete:
            data = data[: data.rfind(b"\n") + 1]
        self._offsets[name] = offset + len(data)
        return [LogLine(rank, line) for line in data.decode(errors="replace").splitlines()]
