"""The journal of a run: ``metrics.jsonl`` and ``events.jsonl``, from which MLflow is fed.

Each line is one JSON object. NaN and infinities are strings, because strict JSON has no such numbers:
    {"step": 10, "time": 1700000000.0, "train/loss": 2.3, "train/grad_norm": "NaN"}
    {"event": "run_ended", "time": 1700000000.0, "status": "FINISHED", ...}
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import posixpath
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.protocol.events import (
    Event,
    MetricsLogged,
    RankProgress,
    RunEnded,
    SampleSaved,
    SystemMetricsLogged,
)
from orchestrator.records.run_dir import RunDir

MAX_LINES_WAITING = 10_000
"""Lines kept in memory while the disk is full; beyond that, the oldest are lost."""

_MAX_NAME_LENGTH = 250
_SYSTEM = "system/"


class Journal:
    """An event sink that writes every event except :class:`RankProgress` to the run directory.

    In a directory that already has a journal, it continues that journal: it cuts off an incomplete last line, writes
    no metric and no sample again at or below its last step, and continues the numbering of ``system/`` readings.

    A line that cannot be written is retried with the next one, after a warning.

    Args:
        warn: shows the user that the disk cannot be written, once; None to give no warning.

    Raises:
        OSError: the files cannot be opened. Later errors are not raised.
    """

    def __init__(self, run_dir: RunDir, *, warn: Callable[[str], None] | None = None):
        self._warn = warn
        self._lock = threading.Lock()
        self._metrics = _Appender(run_dir.metrics_file)
        self._events = _Appender(run_dir.events_file)
        self._last_step: dict[str, int] = {}
        for step, _, metrics in read_metrics(run_dir):
            for name in metrics:
                self._last_step[name] = max(step, self._last_step.get(name, step))
        self._last_sample = {sample.name: sample.step for sample, _ in read_samples(run_dir)}
        system = [step for name, step in self._last_step.items() if name.startswith(_SYSTEM)]
        self._readings_before = max(system) + 1 if system else 0

    def emit(self, event: Event) -> None:
        """Write ``event``."""
        if isinstance(event, RankProgress):
            return
        with self._lock:
            if isinstance(event, MetricsLogged):
                error = self._write_metrics(event.step, event.time, event.metrics)
            elif isinstance(event, SystemMetricsLogged):
                step = self._readings_before + event.step
                error = self._write_metrics(step, event.time, event.metrics)
            elif isinstance(event, SampleSaved) and event.step <= self._last_sample.get(event.name, -1):
                error = None  # a step that is repeated after a recovery or a resume
            else:
                if isinstance(event, RunEnded):
                    self._metrics.flush()  # what is uploaded at the end must be there before the end
                error = self._events.write(_event_line(event))
                if isinstance(event, SampleSaved):
                    self._last_sample[event.name] = event.step
            warn = self._warn if error else None
            if warn:
                self._warn = None  # once
        if warn:
            warn(
                f"cannot write the journal ({error}); training continues, and up to {MAX_LINES_WAITING} lines are kept "
                "in memory: free some disk space"
            )

    def close(self) -> None:
        """Close the files, after one more attempt to write the lines in memory."""
        with self._lock:
            self._metrics.close()
            self._events.close()

    def discard(self) -> None:
        """Close the files without the lines in memory: another process writes to the files."""
        with self._lock:
            self._metrics.discard()
            self._events.discard()

    def _write_metrics(self, step: int, time: float, metrics: Mapping[str, float]) -> str | None:
        line: dict[str, Any] = {"step": step, "time": time}
        for name, value in metrics.items():
            name = metric_name(name)
            if step > self._last_step.get(name, step - 1):
                self._last_step[name] = step
                line[name] = _plain(float(value))
        return self._metrics.write(_line(line)) if len(line) > 2 else None


class _Appender:
    """Appends whole lines to a file; even after a failed write, the file ends with a whole line."""

    def __init__(self, path: Path):
        self._file = path.open("ab+", buffering=0)
        self._waiting: deque[bytes] = deque(maxlen=MAX_LINES_WAITING)
        end = os.fstat(self._file.fileno()).st_size
        whole = _size_of_whole_lines(path)
        if whole < end:
            self._file.truncate(whole)

    def write(self, line: bytes) -> str | None:
        """Return None, or why ``line`` is still in memory."""
        self._waiting.append(line)
        return self.flush()

    def flush(self) -> str | None:
        """Write as many of the waiting lines as fit. Return why some are still in memory; None if none is."""
        size = None
        try:
            while self._waiting:
                line = self._waiting[0]
                size = os.fstat(self._file.fileno()).st_size
                if self._file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._waiting.popleft()
        except OSError as e:
            if size is not None:
                with contextlib.suppress(OSError):
                    self._file.truncate(size)
            return str(e)
        return None

    def discard(self) -> None:
        self._waiting.clear()
        self._file.close()

    def close(self) -> None:
        if not self._file.closed:
            if self._waiting:
                self.flush()
            self._file.close()


def append_event(run_dir: RunDir, event: Event) -> None:
    """Append one event to the journal of a run that has no driver any more. Disk errors are ignored."""
    with contextlib.suppress(OSError):
        events = _Appender(run_dir.events_file)
        events.write(_event_line(event))
        events.close()


def read_lines(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield every whole line of ``path`` from byte ``offset``, as an object, and the offset after it.

    A missing file has no lines. A last line without a newline is not yielded yet; damaged lines are skipped.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record, offset


def metrics_of(record: Mapping[str, Any]) -> tuple[int, float, dict[str, float]]:
    """Return ``(step, time, {name: value})`` of one line of ``metrics.jsonl``."""
    metrics = {k: float(v) for k, v in record.items() if k not in ("step", "time")}
    return int(record["step"]), float(record["time"]), metrics


def read_metrics(run_dir: RunDir) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield ``(step, time, {name: value})`` of every point, in the order of logging."""
    for record, _ in read_lines(run_dir.metrics_file):
        yield metrics_of(record)


class Sample(NamedTuple):
    """A sample of the job: an image (``.png``) or a text (``.txt``); ``time`` in seconds since the epoch."""

    name: str
    step: int
    time: float
    path: Path


def read_samples(run_dir: RunDir, offset: int = 0) -> Iterator[tuple[Sample, int]]:
    """Yield each sample in a run directory from byte ``offset`` of ``events.jsonl``, and the offset after its event."""
    for record, line_end in read_lines(run_dir.events_file, offset):
        if record.get("event") == "sample_saved":
            path = run_dir.path / record["path"]
            if run_dir.holds(path):
                yield Sample(record["name"], int(record["step"]), float(record["time"]), path), line_end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended.

    Attributes:
        status: FINISHED, FAILED or KILLED.
        time: seconds since the epoch.
    """

    status: str
    time: float
    summary: Mapping[str, Any]


def read_ending(run_dir: RunDir, *, offset: int = 0, before: Ending | None = None) -> tuple[Ending | None, int]:
    """Return the ending of a run, None if it is running, and the offset after its events.

    Args:
        offset: the byte of ``events.jsonl`` to start from.
        before: the ending according to the events before ``offset``; a later ``run_started`` revokes it.
    """
    ending = before
    for record, line_end in read_lines(run_dir.events_file, offset):
        offset = line_end
        if record.get("event") == "run_started":
            ending = None
        elif record.get("event") == "run_ended":
            ending = Ending(status=record["status"], time=record["time"], summary=record.get("summary") or {})
    return ending, offset


@functools.cache
def clean_name(name: str) -> str:
    """Return ``name`` with ``_`` for characters that MLflow refuses in names of metrics, parameters and tags."""
    name = posixpath.normpath(re.sub(r"[^a-zA-Z0-9_\-./: ]", "_", name))
    return name.lstrip("/.")[:_MAX_NAME_LENGTH]


def metric_name(name: str) -> str:
    """Return ``name`` as the journal and MLflow have it; ``_step`` for ``step``, which is another key of a line."""
    name = clean_name(name)
    return f"_{name}" if name in ("", "step", "time") else name


def _event_line(event: Event) -> bytes:
    fields = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
    line = {"event": event.kind, "time": fields.pop("time"), **fields}
    return _line(_plain(line))


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False, ensure_ascii=False).encode(errors="replace") + b"\n"


def _plain(value: Any) -> Any:
    """``value`` as strict JSON can represent it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value)


def _size_of_whole_lines(path: Path) -> int:
    """The number of bytes up to the last newline, including it."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0
