"""The journal of a run: ``metrics.jsonl`` and ``events.jsonl``, from which MLflow is fed.

Each line is one JSON object. NaN and infinities are strings, because strict JSON has no such numbers:
    {"step": 10, "time": 1700000000.0, "train/loss": 2.3, "train/grad_norm": "NaN"}
    {"event": "run_ended", "time": 1700000000.0, "status": "FINISHED", ...}

A run that continues from an earlier step than it had reached repeats the steps after it. A line of ``metrics.jsonl``
says so, and discards what the lines before it have of later steps:
    {"step": 5, "time": 1700000000.0, "continues": true}
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
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
from orchestrator.records.storable_names import metric_name

MAX_LINES_WAITING = 10_000
"""Lines kept in memory while the disk is full; beyond that, the oldest are lost."""

_SYSTEM = "system/"
OF_NO_ATTEMPT = (_SYSTEM, "recovery/")
"""Metrics of the machines and of the run itself, which stay when steps are repeated."""
_CONTINUES = "continues"
_KEYS = ("step", "time", _CONTINUES)
"""The keys of a line that are no metrics."""


class Journal:
    """An event sink that writes every event except :class:`RankProgress` to the run directory.

    In a directory that already has a journal, it continues that journal: it cuts off an incomplete last line, writes
    no metric and no sample again at or below its last step, and continues the numbering of ``system/`` readings. If the
    run continues from an earlier step, what was logged of later ones is discarded and written anew.

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
                elif (continued := _continuation({"event": event.kind, **vars(event)})) is not None:
                    self._discard_after(continued, event.time)
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

    def _discard_after(self, step: int, time: float) -> None:
        """Let the points and samples of later steps count no more."""
        later = [n for n, last in self._last_step.items() if last > step and not n.startswith(OF_NO_ATTEMPT)]
        if later:
            self._last_step |= dict.fromkeys(later, step)
            self._metrics.write(_line({"step": step, "time": time, _CONTINUES: True}))
        self._last_sample = {name: min(last, step) for name, last in self._last_sample.items()}


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


def read_lines(source: Path | bytes, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield every whole line of a file, or of its contents, from byte ``offset`` as an object, and the offset after it.

    A missing file has no lines. A last line without a newline is not yielded yet; damaged lines are skipped.
    """
    for line, line_end in _whole_lines(source, offset):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record, line_end


def _whole_lines(source: Path | bytes, offset: int) -> Iterator[tuple[bytes, int]]:
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield line, offset


class Points(NamedTuple):
    """The values of one line of ``metrics.jsonl``; ``end`` is the offset after the line."""

    step: int
    time: float
    metrics: dict[str, float]
    end: int


def read_points(source: Path | bytes, offset: int = 0, *, end: float = math.inf) -> Iterator[Points]:
    """Yield the lines of a ``metrics.jsonl``, without the values that later lines discard; damaged lines are skipped.

    Args:
        source: the file, or its contents.
        offset: the byte to start from.
        end: read as if the file had no more bytes.
    """
    continued = [(line_end, step) for line_end, step in _continuations(source, offset) if line_end <= end]
    for record, line_end in read_lines(source, offset):
        if line_end > end:
            return
        while continued and continued[0][0] <= line_end:
            del continued[0]
        with contextlib.suppress(ValueError, KeyError, TypeError):
            step, time = int(record["step"]), float(record["time"])
            discarded = step > min((from_step for _, from_step in continued), default=step)
            metrics = {
                name: float(value)
                for name, value in record.items()
                if name not in _KEYS and not (discarded and not name.startswith(OF_NO_ATTEMPT))
            }
            yield Points(step, time, metrics, line_end)


def _continuations(source: Path | bytes, offset: int) -> Iterator[tuple[int, int]]:
    """Yield each line from ``offset`` that discards values: the offset after it, and the last step that stays."""
    mark = f'"{_CONTINUES}"'.encode()
    for line, line_end in _whole_lines(source, offset):
        if mark in line:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                yield line_end, int(json.loads(line)["step"])


def discards_before(path: Path, offset: int) -> bool:
    """Return whether lines of a ``metrics.jsonl`` from byte ``offset`` discard values before it."""
    stays = min((step for _, step in _continuations(path, offset)), default=math.inf)
    before = () if stays == math.inf else read_points(path, end=offset)
    return any(line.step > stays and not n.startswith(OF_NO_ATTEMPT) for line in before for n in line.metrics)


def read_metrics(run_dir: RunDir) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield ``(step, time, {name: value})`` of every point that counts, in the order of logging."""
    for line in read_points(run_dir.metrics_file):
        if line.metrics:
            yield line.step, line.time, line.metrics


class Point(NamedTuple):
    """One value of a metric; ``time`` in seconds since the epoch."""

    name: str
    value: float
    time: float
    step: int


class Sample(NamedTuple):
    """A sample of the job: an image (``.png``) or a text (``.txt``); ``time`` in seconds since the epoch."""

    name: str
    step: int
    time: float
    path: Path


def read_samples(run_dir: RunDir, offset: int = 0) -> Iterator[tuple[Sample, int]]:
    """Yield each sample in a run directory from byte ``offset`` of ``events.jsonl``, and the offset after its event.

    Samples of a step that the run has repeated since are left out.
    """
    found: list[tuple[Sample, int]] = []
    for record, line_end in read_lines(run_dir.events_file, offset):
        if record.get("event") == "sample_saved":
            path = run_dir.path / record["path"]
            if run_dir.holds(path):
                found.append((Sample(record["name"], int(record["step"]), float(record["time"]), path), line_end))
        elif (step := _continuation(record)) is not None:
            found = [(sample, end) for sample, end in found if sample.step <= step]
    yield from found


def _continuation(record: Mapping[str, Any]) -> int | None:
    """Return the step that the run goes on from by a line of ``events.jsonl``; None if it does not say so."""
    match record:
        case {"event": "continued", "step": int(step)}:
            return step
        case {"event": "run_started", "resumed_from_step": int(step), "source": None}:
            return step
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended.

    Attributes:
        status: FINISHED, PRUNED, FAILED or KILLED.
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
