"""The upload of a journal to a tracking server: it may stop anywhere, resumes there, and loses or doubles no point.

``tracking.json`` holds the position. It is written after the server has confirmed a request.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from orchestrator.config.redact import redact_text
from orchestrator.protocol.events import RunEnded
from orchestrator.records.file_lock import locked
from orchestrator.records.journal import Ending, append_event, metrics_of, read_ending, read_lines
from orchestrator.records.run_dir import RunDir, read_json, write_json
from orchestrator.tracking.backend import Point, TrackingBackend
from orchestrator.tracking.uri import redact_uri, uri_secrets


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """What the server at ``uri`` (redacted) has of a run.

    ``points`` counts the uploaded values, from the first ``offset`` bytes of ``metrics.jsonl``. ``closed_at`` is the
    time of the ending that has been uploaded with its artifacts, None if none has. ``error`` says why the last
    attempt failed.
    """

    uri: str = ""
    run_id: str | None = None
    offset: int = 0
    points: int = 0
    closed_at: float | None = None
    error: str | None = None


def read_cursor(run_dir: RunDir) -> Cursor:
    """Return the cursor of a run; the start if there is none yet or it is damaged."""
    try:
        data = read_json(run_dir.tracking_file)
    except ValueError:
        data = {}
    names = {f.name for f in fields(Cursor)}
    return Cursor(**{k: v for k, v in data.items() if k in names})


def count_points(run_dir: RunDir, *, offset: int = 0) -> int:
    """Return the number of values in ``metrics.jsonl`` from byte ``offset``."""
    return sum(len(record) - 2 for record, _ in read_lines(run_dir.metrics_file, offset))


class Transfer:
    """The upload of one run to one server. Hold :func:`exclusive` while using it."""

    def __init__(self, run_dir: RunDir, backend: TrackingBackend):
        self._run_dir = run_dir
        self._backend = backend
        self._opened = False
        cursor = read_cursor(run_dir)
        uri = redact_uri(backend.uri)
        self.cursor = cursor if cursor.uri == uri else Cursor(uri=uri)

    def push(self, ending: Ending | None) -> None:
        """Upload every whole line of the journal; with an ``ending``, also close the run.

        Raises:
            Exception: whatever the backend raised. The cursor is at the last confirmed point and has the error.
        """
        try:
            run_id = self._open(running=ending is None)
            for points, offset in self._batches():
                self._backend.log_points(run_id, points)
                count = self.cursor.points + len(points)
                self._advance(offset=offset, points=count, closed_at=None, error=None)
            if ending and self.cursor.closed_at != ending.time:
                self._backend.close_run(run_id, self._run_dir.read_record(), ending, self._run_dir)
                self._advance(closed_at=ending.time, error=None)
            elif self.cursor.error:
                self._advance(error=None)
        except Exception as e:
            self._opened = False  # the run may have been deleted on the server
            self._advance(error=self._describe(e))
            raise

    def _open(self, *, running: bool) -> str:
        if not self._opened or self.cursor.run_id is None:
            run_id = self._backend.open_run(
                self._run_dir.read_record(),
                run_id=self.cursor.run_id,
                start_time=_start_time(self._run_dir),
                running=running,
            )
            if run_id != self.cursor.run_id:
                # The server does not have the run of the cursor: upload everything again.
                self.cursor = Cursor(uri=self.cursor.uri)
                self._advance(run_id=run_id)
            self._opened = True
        assert self.cursor.run_id is not None
        return self.cursor.run_id

    def _batches(self) -> Iterator[tuple[list[Point], int]]:
        """Yield points of whole lines, about as many as one request takes, and the offset after them."""
        path = self._run_dir.metrics_file
        if path.exists() and path.stat().st_size < self.cursor.offset:
            self.cursor = replace(self.cursor, offset=0, points=0)
        offset = self.cursor.offset
        points: list[Point] = []
        for record, line_end in read_lines(path, offset):
            step, at, metrics = metrics_of(record)
            if points and len(points) + len(metrics) > self._backend.max_points_per_request:
                yield points, offset
                points = []
            points += [Point(name, value, at, step) for name, value in metrics.items()]
            offset = line_end
        if points:
            yield points, offset

    def _advance(self, **changes: Any) -> None:
        self.cursor = replace(self.cursor, **changes)
        with contextlib.suppress(OSError):  # a full disk: at worst, points are uploaded again
            write_json(self._run_dir.tracking_file, asdict(self.cursor))

    def _describe(self, error: Exception) -> str:
        text = redact_text(f"{type(error).__name__}: {error}", uri_secrets(self._backend.uri))
        return text.splitlines()[0][:500]


def _start_time(run_dir: RunDir) -> float:
    """The time of the first event."""
    first = next(read_lines(run_dir.events_file), None)
    return float(first[0]["time"]) if first else time.time()


def exclusive(run_dir: RunDir, *, timeout_s: float = 0.0) -> contextlib.AbstractContextManager[bool]:
    """Hold the upload lock of a run during the block; enters False if another process still has it at the timeout.

    Without locks on the file system, two uploads may run at once. They store each point once, too.
    """
    return locked(run_dir.path / "tracking.lock", timeout_s=timeout_s)


def mark_killed(run_dir: RunDir, *, reason: str) -> None:
    """Record the end of a run whose driver has died; a run with a live driver is left alone.

    Disk errors are ignored.
    """
    record = run_dir.read_record()
    if record.get("state") != "running" or run_dir.driver_if_running():
        return
    append_event(run_dir, RunEnded(status="KILLED", exit_code=137, reason=reason, summary={}))
    with contextlib.suppress(OSError):
        run_dir.update_record(state="killed")


def final_ending(run_dir: RunDir) -> Ending | None:
    """Return how the run ended, from its events or, if a full disk kept them from being written, from ``run.json``."""
    ending, _ = read_ending(run_dir)
    record = run_dir.read_record()
    state = record.get("state", "running")
    if ending is None and state != "running":
        last = run_dir.metrics_file if run_dir.metrics_file.exists() else run_dir.record_file
        at = last.stat().st_mtime
        return Ending(status=state.upper(), time=at, summary=record.get("summary") or {})
    return ending
