"""MLflow as a tracking server. The only module that imports MLflow, and only when it connects."""

from __future__ import annotations

import contextlib
import glob
import logging
import math
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.features.tracking import mlflow_model, mlflow_sweep, views
from orchestrator.features.tracking.uri import sqlite_path, sqlite_uri, uri_for_mlflow, web_page
from orchestrator.features.tracking.views import DESCRIPTION, MAX_NAME_LENGTH, UID_TAG, run_name, run_tags
from orchestrator.records.journal import Ending, Point, Sample
from orchestrator.records.lock import locked
from orchestrator.records.storable_names import storable_name, storable_text
from orchestrator.records.sweep_dir import REPORT

if TYPE_CHECKING:
    from mlflow.entities import Experiment, Run
    from mlflow.tracking import MlflowClient

MAX_PARAMS_PER_BATCH = 100
MAX_PARAM_LENGTH = 6000
MAX_BATCH_LENGTH = 150_000
"""The characters in a request, which JSON may make six times as long: MLflow takes a million bytes."""
SMALL_IMAGE_PIXELS = 256

_MAX_FOLDER_LENGTH = 60  # of up to 255 bytes

_SAMPLES = "samples"
_IMAGES_TAG = "mlflow.loggedImages"
"""Tells MLflow's page to show image charts."""
_DISCARDED = " (discarded: the run has repeated steps)"
_REFUSALS = {
    401: "it refuses the login; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
    403: "your user may not write there; an administrator of the server can grant EDIT on the experiment",
}
"""By HTTP status: what it means and what to do."""


def connect(uri: str, *, request_timeout_s: float) -> MlflowClient:
    """Return a client that gives up on a silent server after ``request_timeout_s`` and leaves retries to its caller."""
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(max(1, math.ceil(request_timeout_s)))
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # opt-in only
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    uri = uri_for_mlflow(uri)
    return MlflowClient(uri, registry_uri=uri)


class OpenedRun(NamedTuple):
    """A run on the server: its id there, and the address of the page that compares it with others, if there is one."""

    id: str
    page: str | None


class MlflowBackend:
    """The MLflow server or database at ``uri``, which may contain passwords.

    Every call may be repeated, for example after a timeout whose request had in fact arrived: a run is found again
    by its uid, and equal points and samples are stored once. The first call connects. A call raises whatever MLflow
    raises, which :meth:`describe` puts into words; the caller retries.
    """

    max_points_per_request = 1000

    def __init__(self, uri: str, *, request_timeout_s: float):
        self.uri = uri
        self._request_timeout_s = request_timeout_s
        self._client: MlflowClient | None = None

    def open_run(self, record: Mapping[str, Any], *, run_id: str | None, start_time: float, running: bool) -> OpenedRun:
        """Find or create a run, and set its tags and parameters.

        Args:
            record: the contents of ``run.json``.
            run_id: the id that an earlier call returned; None if there was none.
            start_time: seconds since the epoch, for a run that is created.
            running: whether the run has not ended. A run that has ended on the server then becomes running again.
        """
        client = self._connected()
        run = _active_run(client, run_id) if run_id else None
        if run is None:
            experiment_id = _experiment(client, record["tracking"]["experiment"], self.uri)
            run = _find(client, experiment_id, UID_TAG, record["uid"])
            if run is None:
                run = client.create_run(
                    experiment_id,
                    start_time=_milliseconds(start_time),
                    tags={UID_TAG: record["uid"]},
                    run_name=run_name(record),
                )
        run_id = str(run.info.run_id)
        experiment_id = run.info.experiment_id
        view = views.COMPARE
        if sweep := record.get("sweep"):
            start_ms = _milliseconds(start_time)
            mlflow_sweep.open_sweep(client, experiment_id, sweep, start_ms=start_ms, running=running)
            view = views.sweep_view(sweep["id"], sweep["name"], created_ms=start_ms)
        _log_params_and_tags(client, run, params=record.get("params", {}), tags=run_tags(record))
        if running and run.info.status != "RUNNING":
            client.update_run(run_id, status="RUNNING")
        server = web_page(self.uri)
        return OpenedRun(run_id, None if server is None else views.page(server, experiment_id, view))

    def discard_run(self, run_id: str) -> None:
        """Let a run be found no more: a server cannot delete single values, and some of its values were discarded.

        It goes to MLflow's trash; where the user may not delete it, it stays in the list under another name.
        """
        client = self._connected()
        from mlflow.exceptions import MlflowException

        run = client.get_run(run_id)
        name = storable_text(run.info.run_name, MAX_NAME_LENGTH - len(_DISCARDED)) + _DISCARDED
        client.update_run(run_id, status="KILLED", name=name)
        if UID_TAG in run.data.tags:
            client.delete_tag(run_id, UID_TAG)
        with contextlib.suppress(MlflowException):
            client.delete_run(run_id)

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        """Store the values of metrics."""
        client = self._connected()
        from mlflow.entities import Metric

        metrics = [Metric(p.name, p.value, _milliseconds(p.time), p.step) for p in points]
        for batch in _batches(metrics, self.max_points_per_request):
            client.log_batch(run_id, metrics=batch)

    def log_sample(self, run_id: str, sample: Sample) -> None:
        """Store a sample: an image as a step of an image chart, a text as an artifact below ``samples/``."""
        client = self._connected()
        if sample.path.suffix == ".png":
            _log_image(client, run_id, sample)
        else:
            client.log_artifact(run_id, str(sample.path), artifact_path=_SAMPLES)

    def close_run(self, run_id: str, record: Mapping[str, Any], ending: Ending) -> None:
        """Store the summary, the final status and the description of a run that has ended.

        The numbers of the summary become metrics at step 0, which MLflow draws as bars across runs.
        """
        client = self._connected()
        bars = [
            Point(storable_name(f"summary/{key}"), _rounded(float(value)), ending.time, 0)
            for key, value in ending.summary.items()
            if _is_number(value)
        ]
        self.log_points(run_id, bars)
        run = client.get_run(run_id)
        _log_params_and_tags(client, run, params={}, tags=run_tags(record))
        if (is_pruned := ending.status == "PRUNED") and run.info.run_name != run_name(record):
            client.update_run(run_id, name=run_name(record))
        client.set_terminated(run_id, "FINISHED" if is_pruned else ending.status, _milliseconds(ending.time))
        if sweep := record.get("sweep"):
            mlflow_sweep.end_sweep(client, run.info.experiment_id, sweep)

    def log_file(self, run_id: str, file: Path, folder: str) -> None:
        """Store a file of a run under its name in ``folder``, which is empty for the top."""
        self._connected().log_artifact(run_id, str(file), artifact_path=folder or None)

    def log_model(self, run_id: str, folder: Path) -> None:
        """Store the final model of a run and what identifies its data, as ``features.export`` wrote them."""
        mlflow_model.log_model(self._connected(), run_id, folder)

    def log_sweep(self, run_id: str, sweep: Mapping[str, str], files: Sequence[Path]) -> None:
        """Store the report of the sweep that a run belongs to; ``sweep`` has its id and name."""
        client = self._connected()
        report = next((file.read_text(errors="replace") for file in files if file.name == REPORT), "")
        experiment_id = client.get_run(run_id).info.experiment_id
        mlflow_sweep.close_sweep(client, experiment_id, sweep, report=report, files=files)

    def describe(self, error: Exception) -> str:
        """Return the meaning of an error of a call and, if known, the remedy. It may contain secrets."""
        from mlflow.exceptions import ERROR_CODE_TO_HTTP_STATUS, MlflowException

        status = ERROR_CODE_TO_HTTP_STATUS.get(error.error_code) if isinstance(error, MlflowException) else None
        return f"HTTP {status}: {_REFUSALS[status]}" if status in _REFUSALS else f"{type(error).__name__}: {error}"

    def _connected(self) -> MlflowClient:
        if self._client is None:
            if (database := sqlite_path(self.uri)) is not None:
                create_database(database, self._create_tables, timeout_s=self._request_timeout_s)
            self._client = connect(self.uri, request_timeout_s=self._request_timeout_s)
        return self._client

    def _create_tables(self, database: Path) -> None:
        client = connect(sqlite_uri(database), request_timeout_s=self._request_timeout_s)
        client.search_experiments(max_results=1)  # the first call creates them


def _active_run(client: MlflowClient, run_id: str) -> Run | None:
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as e:
        if e.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def _experiment(client: MlflowClient, name: str, uri: str) -> str:
    """Find or create an experiment with our views of its runs, and return its id."""
    experiment = _find_or_create_experiment(client, name, uri)
    experiment_id = str(experiment.experiment_id)
    tags = views.experiment_tags()
    note, described = views.note(experiment_id), experiment.tags.get(DESCRIPTION, "")
    if not described or (described.startswith(views.NOTE_BEGINS) and not described.startswith(note)):
        tags[DESCRIPTION] = note
    for key, value in tags.items():
        if experiment.tags.get(key) != value:
            client.set_experiment_tag(experiment_id, key, value)
    return experiment_id


def _find_or_create_experiment(client: MlflowClient, name: str, uri: str) -> Experiment:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            client.create_experiment(name, artifact_location=_artifacts(uri, name))
        except MlflowException as e:
            if e.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        experiment = client.get_experiment_by_name(name)
        assert experiment is not None
    if experiment.lifecycle_stage != "active":
        raise ValueError(f"tracking.experiment={name}: deleted on the server; restore it or choose another name")
    return experiment


def _artifacts(uri: str, experiment: str) -> str | None:
    """A folder next to the database: MLflow's default depends on the working directory of the process."""
    database = sqlite_path(uri)
    if database is None:
        return None
    folder = re.sub(r"^\.+$|[^\w.-]", "_", experiment)[:_MAX_FOLDER_LENGTH]
    path = database.absolute().parent / "mlartifacts" / folder
    return path.as_uri() if "%" in str(path) else str(path)  # MLflow decodes a path, too


def _find(client: MlflowClient, experiment_id: str, tag: str, value: str) -> Run | None:
    runs = client.search_runs([experiment_id], f"tags.`{tag}` = '{value}'", max_results=1)
    return runs[0] if runs else None


def _log_params_and_tags(client: MlflowClient, run: Run, *, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
    """Set new and changed tags, and the parameters that the server lacks: MLflow refuses to change a parameter."""
    from mlflow.entities import Param, RunTag

    cleaned = {storable_name(key): param_text(value) for key, value in params.items()}
    new = [Param(k, v) for k, v in cleaned.items() if k not in run.data.params]
    changed = [RunTag(k, v) for k, v in tags.items() if run.data.tags.get(k) != v]
    for param_batch in _small_batches(new):
        client.log_batch(run.info.run_id, params=param_batch)
    for tag_batch in _small_batches(changed):
        client.log_batch(run.info.run_id, tags=tag_batch)


def param_text(value: Any) -> str:
    """Return a parameter as MLflow stores it: a number as it is typed, ``3`` for 3.0 and ``1e-5`` for 1e-05."""
    text = str(value)
    if isinstance(value, float):
        text = re.sub(r"e([+-])0*", lambda m: "e" + m[1].strip("+"), text.removesuffix(".0"))
    return storable_text(text, MAX_PARAM_LENGTH)


def _log_image(client: MlflowClient, run_id: str, sample: Sample) -> None:
    """Store an image as ``MlflowClient.log_image`` does, but under the same name when it is repeated.

    The image charts of MLflow's page read the key, the step and the time from the names of the files, and show the
    small copy first.
    """
    from PIL import Image

    unique = uuid.uuid5(uuid.NAMESPACE_URL, f"{run_id}/{sample.name}/{sample.step}")
    stem = f"{sample.name}+step+{sample.step}+timestamp+{_milliseconds(sample.time)}+{unique}"
    with tempfile.TemporaryDirectory() as folder, Image.open(sample.path) as image:
        files = [Path(folder) / f"{stem}.png", Path(folder) / f"{stem}+compressed.webp"]
        shutil.copyfile(sample.path, files[0])
        scale = SMALL_IMAGE_PIXELS / max(image.size)
        size = (max(1, int(image.width * scale)), max(1, int(image.height * scale)))
        how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS  # pixels of a tiny image stay sharp
        image.resize(size, how).save(files[1])
        for file in files:
            client.log_artifact(run_id, str(file), artifact_path="images")
    client.set_tag(run_id, _IMAGES_TAG, "True")


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def _small_batches(items: Sequence[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    length = 0
    for item in items:
        if batch and (len(batch) == MAX_PARAMS_PER_BATCH or length + len(item.value) > MAX_BATCH_LENGTH):
            yield batch
            batch, length = [], 0
        batch.append(item)
        length += len(item.value)
    if batch:
        yield batch


def _milliseconds(time: float) -> int:
    return round(time * 1000)


def _rounded(value: float) -> float:
    """``value`` with as many digits as a column of MLflow's table shows; whole numbers stay."""
    return value if value.is_integer() else float(f"{value:.5g}")


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("NaN", "Infinity", "-Infinity")
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def create_database(path: Path, migrate: Callable[[Path], None], *, timeout_s: float) -> None:
    """Create the database at ``path`` unless it exists. An empty file counts as no database.

    MLflow creates its tables in many steps, and a database that was left in the middle of them cannot be opened again.
    So the tables are created in a file beside it, which is then renamed. Of several processes, one does this, and the
    others wait.

    Args:
        migrate: creates the tables in the file that it is given.
        timeout_s: the longest wait for another process.

    Raises:
        TimeoutError: another process still holds the lock.
    """
    if _exists(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock"), timeout_s=timeout_s):
        if _exists(path):
            return
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.new*"):  # by a process that was killed
            left.unlink(missing_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            migrate(temporary)
            if not _exists(path):  # a process that does not know this lock may have created it
                temporary.replace(path)
        finally:
            for suffix in ("", "-journal", "-wal", "-shm"):
                temporary.with_name(temporary.name + suffix).unlink(missing_ok=True)


def _exists(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False
