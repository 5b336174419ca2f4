"""Reading the logs of a run's ranks while they grow."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.records.rank_log import rank_and_part
from orchestrator.records.run_dir import RunDir, files_below


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
