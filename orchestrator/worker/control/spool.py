"""Reports that the driver has not received yet, on disk, so that they survive the worker's process."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.protocol.events import Event
from orchestrator.protocol.messages import EvalPoint, TrainPoint

Report = TrainPoint | EvalPoint | Event
"""What a worker reports with a heartbeat."""

_PACKAGES = ("orchestrator.protocol.", "orchestrator.timeline")
"""The packages of the classes that reports consist of. No other class is unpickled."""


class Spool:
    """Two files that are written in turn, so that one of them always has complete reports.

    Args:
        path: the files are ``<path>.0`` and ``<path>.1``.

    Raises:
        OSError: they cannot be created. Later errors are ignored: they matter only if the process dies.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(exist_ok=True)
        self._current, self._other = (file.open("ab", buffering=0) for file in spool_files(path))
        for file in (self._current, self._other):
            file.truncate(0)
            file.seek(0)

    def append(self, number: int, report: Report) -> None:
        """Add a point or an event; ``number`` counts what this process adds."""
        with contextlib.suppress(OSError):
            self._current.write(pickle.dumps((number, report)))

    def turn(self) -> None:
        """Drop the reports that the driver has received. Call this at every heartbeat.

        The driver asks for the next heartbeat only after it has received the last one.
        """
        with contextlib.suppress(OSError):
            if self._other.tell() > 0:
                self._other.truncate(0)
                self._other.seek(0)
            self._current, self._other = self._other, self._current


def read_spool(path: Path) -> Iterator[tuple[int, Report]]:
    """Yield the numbers, points and events that a process has left in its :class:`Spool`, in order.

    There are none if the files cannot be read. A report that is cut off, and what follows it, is left out.
    """
    found = dict(itertools.chain.from_iterable(_read(file) for file in spool_files(path)))
    yield from sorted(found.items())


def remove_spool(path: Path) -> None:
    """Delete the files of a process that has ended."""
    with contextlib.suppress(OSError):
        for file in spool_files(path):
            file.unlink(missing_ok=True)


def spool_files(path: Path) -> tuple[Path, Path]:
    """Return the files of the :class:`Spool` at ``path``."""
    return path.with_name(f"{path.name}.0"), path.with_name(f"{path.name}.1")


def _read(path: Path) -> Iterator[tuple[int, Report]]:
    with contextlib.suppress(OSError), path.open("rb") as file:
        while True:
            try:
                number, report = _ReportUnpickler(file).load()
            except Exception:  # the end of the file, or damage, at which unpickling may raise anything
                return
            yield number, report


class _ReportUnpickler(pickle.Unpickler):
    """Others may write to the run directory: create nothing but reports."""

    def find_class(self, module: str, name: str) -> Any:
        # A dotted name leads through a module to whatever that imports.
        is_ours = module.startswith(_PACKAGES) and "." not in name
        found = super().find_class(module, name) if is_ours else None
        if not isinstance(found, type) or found.__module__ != module:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a report")
        return found
