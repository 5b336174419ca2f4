"""The upload of a journal to a tracking server: it may stop anywhere, resumes there, and loses or doubles no point.

``tracking.json`` holds the position. It is written after the server has confirmed a request.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from orchestrator.config.redact import Redactor
from orchestrator.features.tracking.mlflow import MlflowBackend
from orchestrator.features.tracking.pending_uploads import clear_pending
from orchestrator.features.tracking.uri import redact_uri
from orchestrator.records import journal
from orchestrator.records.json_file import read_json, write_json
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import RunDir, files_below
from orchestrator.records.storable_names import storable
from orchestrator.records.sweep_dir import SweepDir

_FILES = ("config.yaml", "auto.md", "auto.json", "timeline.json")
_FOLDERS = ("logs", "profile")
_PLAN = "plan.json"
_BYTES_TO_TELL_TEXT = 8192
_SCRATCH = ".upload"


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """What the server at ``uri`` (redacted) has of a run.

    Attributes:
        page: the address of the page with the charts; None if there is none.
        offset: the size of the part of ``metrics.jsonl`` that has been uploaded.
        points: how many values have been uploaded from it.
        samples_offset: the byte of ``events.jsonl`` after the last uploaded sample.
        closed_at: the time of the ending that has been uploaded with its artifacts; None if none has.
        model_at: the time of the ending that has been uploaded with its model; None if none has.
        sweep_at: the age of the uploaded report of the sweep; None if none has been uploaded.
        error: why the last attempt failed.
    """

    uri: str = ""
    run_id: str | None = None
    page: str | None = None
    offset: int = 0
    points: int = 0
    samples_offset: int = 0
    closed_at: float | None = None
    model_at: float | None = None
    sweep_at: float | None = None
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
    return sum(len(points.metrics) for points in journal.read_points(run_dir.metrics_file, offset))


class Transfer:
    """The upload of one run to one server. Hold :func:`exclusive` while using it.

    The backend receives nothing in which secrets are not masked: those in the environment of this process, those in
    the address of the server, and ``secrets``.

    Args:
        replaces_run: whether steps that are repeated begin another run on the server, without the values of the
            attempt before; otherwise it has both.
    """

    def __init__(
        self, run_dir: RunDir, backend: MlflowBackend, *, secrets: Sequence[str] = (), replaces_run: bool = True
    ):
        self._replaces_run = replaces_run
        self._run_dir = run_dir
        self._backend = backend
        self._redactor = Redactor.of_process()
        self._redactor.learn({"uri": backend.uri, "secrets": secrets})
        self._opened = False
        self._stored: set[Path] = set()
        """The places of the files that the server has, of those that follow the final status."""
        cursor = read_cursor(run_dir)
        uri = redact_uri(backend.uri)
        self.cursor = cursor if cursor.uri == uri else Cursor(uri=uri)

    def push(self, ending: journal.Ending | None) -> None:
        """Upload every whole line of the journal; with an ``ending``, also close the run.

        Raises:
            OSError: there was no room for the copy of a file; everything else is uploaded.
            Exception: whatever the backend raised. The cursor is at the last confirmed point and has the error.
        """
        try:
            run_id = self._open(running=ending is None)
            if self._replaces_run and journal.discards_before(self._run_dir.metrics_file, self.cursor.offset):
                run_id = self._open_another(running=ending is None)
            for points, offset in self._batches():
                if points:
                    self._backend.log_points(run_id, points)
                count = self.cursor.points + len(points)
                self._advance(offset=offset, points=count, closed_at=None, error=None)
            closing = ending is not None and self.cursor.closed_at != ending.time
            if ending and closing:  # before all files: a store that refuses them still gets the final status
                self._backend.close_run(run_id, self._record(), ending)
            problem = self._upload_files(run_id) if closing else None
            self._upload_samples(run_id)
            if ending:
                self._upload_sweep_report(run_id)
            if problem is not None:
                raise problem
            if ending and closing:
                self._advance(closed_at=ending.time, error=None)
            elif self.cursor.error:
                self._advance(error=None)
            if ending:
                clear_pending(self._run_dir)
        except Exception as e:
            self._opened = False  # the run may have been deleted on the server
            self._advance(error=self._redactor.text(self._backend.describe(e)).splitlines()[0])
            raise

    def push_model(self, folder: Path, ending: journal.Ending) -> None:
        """Upload the final model of a run that :meth:`push` has closed with ``ending``.

        Secrets in the texts of ``folder`` are masked there: MLflow refuses links, and a copy of the weights is large.

        Raises:
            Exception: whatever the backend raised.
        """
        assert self.cursor.run_id is not None
        for path in filter(_is_text, list(folder.iterdir())):
            masked = path.with_name(f".{path.name}")
            self._redactor.copy_file(path, masked)
            masked.replace(path)
        self._backend.log_model(self.cursor.run_id, folder)
        self._advance(model_at=ending.time)

    def _upload_files(self, run_id: str) -> OSError | None:
        """Upload plan, configuration, logs and the like, one after another.

        Returns:
            Why there was no room for the copy of a file; None if there was. The other files are uploaded.
        """
        problem = None
        for file, source in self._files():
            if file in self._stored:
                continue
            with contextlib.ExitStack() as stack:
                try:
                    (copy,) = stack.enter_context(source)
                except OSError as e:
                    problem = e
                    continue
                self._backend.log_file(run_id, copy, "" if len(file.parts) == 1 else str(file.parent))
            self._stored.add(file)
        return problem

    def _files(self) -> Iterator[tuple[Path, contextlib.AbstractContextManager[list[Path]]]]:
        """Yield the files that follow the final status: the place of each in the run directory, and a copy."""
        if plan := self._record().get("plan"):
            yield Path(_PLAN), self._as_file(_PLAN, plan)
        top = [self._run_dir.path / name for name in _FILES]
        for path in (*top, *(path for name in _FOLDERS for path in files_below(self._run_dir.path / name))):
            if path.is_file() and not path.name.startswith(".") and self._run_dir.holds(path):
                yield path.relative_to(self._run_dir.path), self._masked(path)

    def _upload_samples(self, run_id: str) -> None:
        for sample, offset in journal.read_samples(self._run_dir, self.cursor.samples_offset):
            if sample.path.is_file():  # it may have been deleted since
                with self._masked(sample.path) as (masked,):
                    self._backend.log_sample(run_id, sample._replace(path=masked))
            self._advance(samples_offset=offset, closed_at=None, error=None)

    def _upload_sweep_report(self, run_id: str) -> None:
        sweep = self._run_dir.read_record().get("sweep")
        files = SweepDir.of(OutputDir.containing(self._run_dir), sweep["id"]).report_files() if sweep else []
        changed = max((file.stat().st_mtime for file in files), default=None)
        if changed is None or changed == self.cursor.sweep_at:
            return
        with self._masked(*files) as masked:
            self._backend.log_sweep(run_id, storable(self._redactor.data(sweep)), masked)
        self._advance(sweep_at=changed)

    def _open(self, *, running: bool) -> str:
        if not self._opened or self.cursor.run_id is None:
            opened = self._backend.open_run(
                self._record(),
                run_id=self.cursor.run_id,
                start_time=_start_time(self._run_dir),
                running=running,
            )
            if opened.id != self.cursor.run_id:
                # The server does not have the run of the cursor: upload everything again.
                self.cursor = Cursor(uri=self.cursor.uri)
                self._stored.clear()
                self._advance(run_id=opened.id, page=opened.page)
            self._opened = True
        assert self.cursor.run_id is not None
        return self.cursor.run_id

    def _open_another(self, *, running: bool) -> str:
        """Begin again with another run on the server, where the present one has values that the journal discards."""
        assert self.cursor.run_id is not None
        self._backend.discard_run(self.cursor.run_id)
        self.cursor = Cursor(uri=self.cursor.uri)
        self._opened = False
        return self._open(running=running)

    def _record(self) -> Mapping[str, Any]:
        record: Mapping[str, Any] = storable(self._redactor.data(self._run_dir.read_record()))
        return record

    def _masked(self, *files: Path) -> contextlib.AbstractContextManager[list[Path]]:
        return masked_copies(self._run_dir, self._redactor, *files)

    @contextlib.contextmanager
    def _as_file(self, name: str, data: Mapping[str, Any]) -> Iterator[list[Path]]:
        """Yield a file with ``data`` to upload during the block. Raises as :func:`masked_copies`."""
        with _scratch(self._run_dir) as folder:
            write_json(folder / name, data)
            yield [folder / name]

    def _batches(self) -> Iterator[tuple[list[journal.Point], int]]:
        """Yield points of whole lines, about as many as one request takes, and the offset after them."""
        path = self._run_dir.metrics_file
        if path.exists() and path.stat().st_size < self.cursor.offset:
            self.cursor = replace(self.cursor, offset=0, points=0)
        offset = self.cursor.offset
        points: list[journal.Point] = []
        for step, at, metrics, line_end in journal.read_points(path, offset):
            if points and len(points) + len(metrics) > self._backend.max_points_per_request:
                yield points, offset
                points = []
            points += [journal.Point(name, value, at, step) for name, value in metrics.items()]
            offset = line_end
        if offset > self.cursor.offset:
            yield points, offset

    def _advance(self, **changes: Any) -> None:
        self.cursor = replace(self.cursor, **changes)
        with contextlib.suppress(OSError):  # a full disk: at worst, points are uploaded again
            write_json(self._run_dir.tracking_file, asdict(self.cursor))


@contextlib.contextmanager
def masked_copies(run_dir: RunDir, redactor: Redactor, *files: Path, scratch: str = _SCRATCH) -> Iterator[list[Path]]:
    """Yield files to upload during the block: texts as copies with secrets masked, and other files as they are.

    Args:
        scratch: the name of the folder for the copies.

    Raises:
        OSError: there is no room for a copy.
    """
    with _scratch(run_dir, scratch) as folder:
        texts = {file: folder / file.name for file in files if _is_text(file)}
        for file, copy in texts.items():
            redactor.copy_file(file, copy)
        yield [texts.get(file, file) for file in files]


@contextlib.contextmanager
def _scratch(run_dir: RunDir, name: str = _SCRATCH) -> Iterator[Path]:
    """Yield an empty folder, in the run directory because the one for temporary files may be smaller than a log.

    What a process that was killed has left there is removed.
    """
    folder = run_dir.path / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(_BYTES_TO_TELL_TEXT)


def _start_time(run_dir: RunDir) -> float:
    """The time of the first event."""
    first = next(journal.read_lines(run_dir.events_file), None)
    return float(first[0]["time"]) if first else time.time()
