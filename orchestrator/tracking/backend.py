"""The interface to a tracking server, as the upload of a run needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from orchestrator.records.journal import Ending, Sample


class Point(NamedTuple):
    """One value of a metric; ``time`` in seconds since the epoch."""

    name: str
    value: float
    time: float
    step: int


class OpenedRun(NamedTuple):
    """A run on the server: its id there, and the address of the page that compares it with others, if there is one."""

    id: str
    page: str | None


class TrackingBackend(Protocol):
    """One tracking server.

    Every call may be repeated, for example after a timeout whose request had in fact arrived: a run is found again
    by its uid, and equal points and samples are stored once. The first call connects. A call raises whatever the
    library of the server raises, which :meth:`describe` puts into words; the caller retries.
    """

    max_points_per_request: int

    @property
    def uri(self) -> str:
        """The address of the server, which may contain passwords."""

    def open_run(self, record: Mapping[str, Any], *, run_id: str | None, start_time: float, running: bool) -> OpenedRun:
        """Find or create a run, and set its tags and parameters.

        Args:
            record: the contents of ``run.json``.
            run_id: the id that an earlier call returned; None if there was none.
            start_time: seconds since the epoch, for a run that is created.
            running: whether the run has not ended. A run that has ended on the server then becomes running again.
        """

    def discard_run(self, run_id: str) -> None:
        """Let a run be found no more: a server cannot delete single values, and some of its values were discarded."""

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        """Store the values of metrics."""

    def log_sample(self, run_id: str, sample: Sample) -> None:
        """Store a text or an image, whose file exists."""

    def close_run(self, run_id: str, record: Mapping[str, Any], ending: Ending) -> None:
        """Store the summary, the final status and the description of a run that has ended."""

    def log_file(self, run_id: str, file: Path, folder: str) -> None:
        """Store a file of a run under its name in ``folder``, which is empty for the top."""

    def log_model(self, run_id: str, folder: Path) -> None:
        """Store the final model of a run and what identifies its data, as ``orchestrator.exporting`` wrote them."""

    def log_sweep(self, run_id: str, sweep: Mapping[str, str], files: Sequence[Path]) -> None:
        """Store the report of the sweep that a run belongs to; ``sweep`` has its id and name."""

    def describe(self, error: Exception) -> str:
        """Return what an error of a call means and, if that is known, what to do. It may contain secrets."""
