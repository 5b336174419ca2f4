"""Where else the follower writes a run: TensorBoard, which imports torch when a sink is made, and other sinks.

A sink has no position to keep. Each process that feeds it, and each attempt after an error, makes a new one in an
empty folder and gives it the journal from the start; so does a run that repeats steps. No step is there twice.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from orchestrator.config.redact import Redactor
from orchestrator.features.tracking.transfer import masked_copies
from orchestrator.protocol.metrics import summary_value
from orchestrator.records.journal import (
    OF_NO_ATTEMPT,
    Ending,
    Point,
    Points,
    Sample,
    discards_before,
    read_points,
    read_samples,
)
from orchestrator.records.json_file import read_json, write_json
from orchestrator.records.run_dir import RunDir
from orchestrator.records.storable_names import storable

_LINES_AT_ONCE = 500
_ERRORS = "errors.json"
_PATHS = {"tensorboard": f"{__name__}.TensorBoard", "wandb": f"{__package__}.wandb.Wandb"}
"""The import paths of the sinks that have a word of their own."""
_METHODS = ("log_points", "log_sample", "close")


class TrackingSink(Protocol):
    """What a class in ``tracking.sinks`` has. An error of a call is a warning of the run, and is tried again.

    A sink may also have a method ``discard()``, which is called before another one takes its place.

    Args:
        run: the contents of ``run.json``, with secrets masked: ``run["name"]``, ``run["params"]``, ``run["uid"]``, ...
        folder: an empty directory for its files, ``sinks/<class>`` of the run directory.
    """

    def __init__(self, run: Mapping[str, Any], folder: Path) -> None: ...

    def log_points(self, points: Sequence[Point]) -> None:
        """Store values of metrics, which are in the order of logging."""

    def log_sample(self, sample: Sample) -> None:
        """Store a text or an image; its file may be gone afterwards."""

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        """Store the end of the run. ``status`` is FINISHED, PRUNED, FAILED or KILLED."""


def load_sink(path: str) -> type[TrackingSink]:
    """Return the class with the import path, or the word, ``path``.

    Raises:
        ValueError: it cannot be imported, or lacks a method.
    """
    module, _, name = _PATHS.get(path, path).rpartition(".")
    try:
        sink = getattr(importlib.import_module(module), name)
    except Exception as e:  # of any type: the user's module runs
        raise ValueError(
            f"tracking.sinks=[{path}]: cannot be imported ({type(e).__name__}: {e}); give the import path of a class, "
            "such as my_package.Sink"
        ) from e
    if missing := [method for method in _METHODS if not callable(getattr(sink, method, None))]:
        raise ValueError(f"tracking.sinks=[{path}]: lacks {', '.join(missing)}; add the methods of docs/tracking.md")
    loaded: type[TrackingSink] = sink
    return loaded


def sink_problem(run_dir: RunDir) -> str | None:
    """Return which sinks have failed at the last attempt, and why; None if none has. Reads one small file."""
    try:
        errors = read_json(run_dir.sinks / _ERRORS)
    except (OSError, ValueError):
        return None
    return "; ".join(f"{path}: {error}" for path, error in errors.items()) or None


def record_problems(run_dir: RunDir, errors: Mapping[str, str]) -> None:
    """Write what :func:`sink_problem` returns. Disk errors are ignored."""
    with contextlib.suppress(OSError):
        run_dir.sinks.mkdir(exist_ok=True)
        write_json(run_dir.sinks / _ERRORS, errors)


class Sinks:
    """The sinks of one run, by import path or word. Hold the lock of ``sinks`` while using it.

    Args:
        secrets: texts to mask in what the sinks receive, besides those in the environment of this process.
    """

    def __init__(self, run_dir: RunDir, paths: Sequence[str], *, secrets: Sequence[str] = ()):
        self._run_dir = run_dir
        self._redactor = Redactor.of_process()
        self._redactor.learn({"secrets": secrets})
        self._feeds = {path: _Feed(run_dir, path, self._redactor) for path in paths}
        self._errors: dict[str, str] | None = None

    def push(self, ending: Ending | None) -> None:
        """Give each sink every whole line of the journal that it has not received; with an ``ending``, also close it.

        Raises:
            Exception: before the end of the run, whatever the last sink that failed has raised. The others have
                received everything.
        """
        problem: Exception | None = None
        errors = {}
        for path, feed in self._feeds.items():
            try:
                feed.push(ending)
            except Exception as e:  # of any type: the user's code
                problem = e
                feed.begin_again()
                text = self._redactor.text(f"{type(e).__name__}: {e}")
                errors[path] = (text.splitlines() or [""])[0][:500]
        if errors != self._errors:
            self._errors = errors
            record_problems(self._run_dir, errors)
        if problem is not None and ending is None:
            raise problem


class _Feed:
    """What one sink has received of a run."""

    def __init__(self, run_dir: RunDir, path: str, redactor: Redactor):
        self._run_dir = run_dir
        self._path = path
        self._folder = run_dir.sinks / folder_of(path)
        self._redactor = redactor
        self._sink: TrackingSink | None = None
        self.begin_again()

    def begin_again(self) -> None:
        """Make another sink for the next push."""
        if (discard := getattr(self._sink, "discard", None)) is not None:
            with contextlib.suppress(Exception):  # of any type: the user's code
                discard()
        self._sink = None
        self._offset = self._samples_offset = 0
        self._is_closed = False

    def push(self, ending: Ending | None) -> None:
        """See :meth:`Sinks.push`. Raises whatever the sink raises."""
        if self._is_closed:
            return
        if discards_before(self._run_dir.metrics_file, self._offset):
            self.begin_again()
        sink = self._opened()
        samples = deque(read_samples(self._run_dir, self._samples_offset))
        batch: list[Points] = []
        for line in read_points(self._run_dir.metrics_file, self._offset):
            is_next = bool(samples) and line.step > samples[0][0].step and not all(map(_is_of_no_attempt, line.metrics))
            if is_next or len(batch) == _LINES_AT_ONCE:
                self._log(sink, batch)
                batch = []
            while is_next and samples and line.step > samples[0][0].step:
                self._log_sample(sink, *samples.popleft())
            batch.append(line)
        self._log(sink, batch)
        for sample, offset in samples:
            self._log_sample(sink, sample, offset)
        if ending is not None:
            sink.close(ending.status, self._redactor.data(ending.summary, by_key=False))
            self._is_closed = True

    def _log(self, sink: TrackingSink, lines: Sequence[Points]) -> None:
        points = [Point(name, value, line.time, line.step) for line in lines for name, value in line.metrics.items()]
        if points:
            sink.log_points(points)
        if lines:
            self._offset = lines[-1].end

    def _log_sample(self, sink: TrackingSink, sample: Sample, offset: int) -> None:
        if sample.path.is_file():
            with masked_copies(self._run_dir, self._redactor, sample.path, scratch=".sinks") as (copy,):
                sink.log_sample(sample._replace(path=copy))
        self._samples_offset = offset

    def _opened(self) -> TrackingSink:
        if self._sink is None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            record = storable(self._redactor.data(self._run_dir.read_record()))
            self._sink = load_sink(self._path)(record, self._folder)
        return self._sink


def _is_of_no_attempt(name: str) -> bool:
    return name.startswith(OF_NO_ATTEMPT)


def folder_of(path: str) -> str:
    """Return the name of the folder of the sink with this import path or word."""
    return path.rpartition(".")[2].lower()


class TensorBoard:
    """The :class:`TrackingSink` that writes event files into ``folder``."""

    def __init__(self, run: Mapping[str, Any], folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter
        # A page that is open forgets what an earlier process has written.
        self._writer = writer(str(folder), purge_step=0)
        self._params = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in run.get("params", {}).items()
        }

    def log_points(self, points: Sequence[Point]) -> None:
        for point in points:
            self._writer.add_scalar(point.name, point.value, point.step, walltime=point.time)
        self._writer.flush()

    def log_sample(self, sample: Sample) -> None:
        """An image or a text; the numbers of histograms (``.json``) stay in the run directory."""
        name, step, time = sample.name, sample.step, sample.time
        if sample.path.suffix == ".png":
            import numpy as np
            from PIL import Image

            with Image.open(sample.path) as image:
                pixels = np.asarray(image.convert("RGB"))
            self._writer.add_image(name, pixels, step, walltime=time, dataformats="HWC")
        elif sample.path.suffix == ".txt":
            self._writer.add_text(name, sample.path.read_text(errors="replace"), step, walltime=time)
        self._writer.flush()

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        """Write the parameters, with the numbers of the summary as their results."""
        results = {f"summary/{key}": v for key in summary if (v := summary_value(summary, key)) is not None}
        self._writer.add_hparams({**self._params, "status": status}, results, run_name=".")
        self._writer.close()
