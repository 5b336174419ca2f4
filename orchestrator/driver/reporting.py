"""What the driver reports besides the console: to the cluster, to Prometheus, and to the URL ``output_dir``.

What runs leave in the GCS server of a cluster is the metadata of their jobs, for Ray's dashboard and ``ray job list``,
and their output directories, by which ``orchestrator runs --address`` finds the runs of all users, also those that have
ended. The agent of Ray on the driver's node exports the metrics for Prometheus with Ray's own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from ray.util.metrics import Gauge

from orchestrator.compat.ray.connection import is_own_ray
from orchestrator.compat.ray.gcs import add_job_metadata, cluster_values, put_cluster_value
from orchestrator.config.build import ConfigError
from orchestrator.config.operation import StorageConfig
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.driver.process import cluster
from orchestrator.protocol import events
from orchestrator.protocol.core_metrics import LOSS, SAMPLES_PER_S
from orchestrator.records.lease import Lease
from orchestrator.records.output_dir import OutputDir, find_run
from orchestrator.records.run_dir import RunDir
from orchestrator.storage.mirror import Mirror
from orchestrator.storage.remote import is_url


def launch_name(configs: Sequence[Config]) -> str:
    """Return the name of a run, or of the sweep that several runs form."""
    first = configs[0]
    return first.run_name if len(configs) == 1 else f"{first.job_name}-sweep-of-{len(configs)}"


def job_metadata(configs: Sequence[Config], redactor: Redactor) -> dict[str, str]:
    """Return what is known before the runs of a launch begin, with secrets masked."""
    metadata = {
        "job_name": launch_name(configs),  # the column "Name" of the dashboard
        "run": launch_name(configs),
        "strategy": ",".join(dict.fromkeys(c.strategy.name for c in configs)),
        "job": ",".join(dict.fromkeys(c.job_name for c in configs)),
        "tracking": str(configs[0].tracking.uri),
        "output_dir": configs[0].output_dir,
    }
    return {key: redactor.text(value) for key, value in metadata.items()}


def job_state(event: events.Event) -> str | None:
    """Return the state of a run after ``event``, with what it waits for; None if the event does not change it."""
    match event:
        case events.RunStarted():
            return "waiting"
        case events.WaitingInQueue():
            return "waiting: without a place" if event.unfit else f"waiting: place {len(event.ahead) + 1}"
        case events.WaitingForResources():
            return f"waiting: {event.wanted}"
        case events.Yielded():
            return f"waiting: yielded to {event.to}"
        case events.StateChanged():
            return event.state
        case events.RunEnded():
            return event.status.lower()
    return None


class JobStateSink(events.Sink):
    """An event sink that keeps the state of a run in the metadata of its job, if it was submitted as one."""

    def __init__(self) -> None:
        self._state = ""

    def emit(self, event: events.Event) -> None:
        """Write the state if ``event`` changes it."""
        state = job_state(event)
        if state is not None and state != self._state:
            self._state = state
            with contextlib.suppress(Exception):  # of any type: what the dashboard shows must not end a run
                add_job_metadata({"state": state})


def add_tracking_page(page: str) -> None:
    """Add the address of the page with the charts of a run on the tracking server."""
    add_job_metadata({"mlflow": page})


_NAMESPACE = "orchestrator"
_PREFIX = "outputs:"
_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class KnownOutput:
    """An output directory of runs on the cluster.

    Attributes:
        location: absolute path or URL.
        host: the host of the driver that entered it.
        newest: the location of the run that this driver began last.
    """

    location: str
    host: str
    newest: str


def enter_output(run_dir: RunDir, redactor: Redactor) -> None:
    """Enter the output directory of a run that begins; not in a Ray that only this process uses."""
    if is_own_ray():
        return
    location = str(OutputDir.containing(run_dir))
    known = KnownOutput(location=location, host=socket.gethostname(), newest=run_dir.location)
    known = redactor.data(known, by_key=False)
    put_cluster_value(_NAMESPACE, f"{_PREFIX}{known.host}:{known.location}", json.dumps(asdict(known)).encode())


def known_outputs(address: str) -> list[KnownOutput]:
    """Return the entries of the cluster of which this machine is a node; ``address``: host:port, or ``auto``.

    Raises:
        ConfigError: the cluster cannot be reached.
    """
    if (error := cluster.address_error(address, key="--address")) is not None:
        raise ConfigError([error])
    gcs = cluster.gcs_address(address)
    assert gcs is not None, "otherwise there is an error"
    values = cluster_values(gcs, _NAMESPACE, _PREFIX, timeout_s=_TIMEOUT_S)
    found = []
    for value in values:
        with contextlib.suppress(TypeError, ValueError):  # of another version
            found.append(KnownOutput(**json.loads(value)))
    return found


def readable(known: Iterable[KnownOutput]) -> tuple[list[str], list[str]]:
    """Return the directories that this process can read, and a note on each whose runs, or some of them, it cannot.

    Directories of this host that have been removed are left out.
    """
    directories, notes = [], []
    for output in known:
        is_of_here = output.host == socket.gethostname()
        try:
            if not is_url(output.location):
                os.scandir(output.location).close()
            if find_run(output.newest) is None and not is_of_here:
                notes.append(f"{output.newest} of host {output.host} is not on this one; is the directory shared?")
            directories.append(output.location)
        except OSError as e:
            if not (is_of_here and isinstance(e, FileNotFoundError)):
                notes.append(f"the runs in {output.location} of host {output.host} cannot be read: {e.strerror or e}")
    return directories, notes


class RecordUpload:
    """Uploads the files of a run directory while the run lasts; does nothing if ``output_dir`` is a directory.

    It uploads only as long as this process has the ``lease``.
    """

    def __init__(self, run_dir: RunDir, lease: Lease, config: StorageConfig, redactor: Redactor):
        self._run_dir = run_dir
        self._flush_timeout_s = config.flush_timeout_s
        self._mirror = None
        if run_dir.remote is not None:
            self._mirror = Mirror(
                run_dir.path,
                run_dir.remote,
                every_s=config.upload_every_s,
                masked=redactor.copy_file,
                admitted=lease.is_mine,
            )

    def problem(self) -> str | None:
        """Return why the last upload failed, None if it did not."""
        return None if self._mirror is None else self._mirror.problem()

    def finish(self) -> str | None:
        """Upload the rest, for at most ``storage.flush_timeout_s``.

        Returns:
            What is not uploaded and where it is; None if everything is.
        """
        if self._mirror is None or not (missing := self._mirror.finish(self._flush_timeout_s)):
            return None
        files = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        why = self._mirror.problem() or f"storage.flush_timeout_s={self._flush_timeout_s:g} was not enough"
        return f"not uploaded to {self._run_dir.location}: {files} ({why}); the files are in {self._run_dir.path}"


NAMESPACE = "ray"
"""Ray exports each metric as ``ray_<name>``."""

GAUGES = {
    "orchestrator_loss": "training loss at the last logged step",
    "orchestrator_samples_per_s": "training samples per second, of all workers together",
    "orchestrator_step": "last logged step",
    "orchestrator_workers": "worker processes of the current generation",
    "orchestrator_restarts": "generations after the first one: recoveries and planned pauses since the launch",
}
"""The description of each metric by name."""

LABELS = ("run", "strategy", "job_name")
"""The labels of each metric. Prometheus itself sets a label ``job``."""

REFRESH_S = 1.0


class PrometheusSink(events.Sink):
    """An event sink that exports the newest values of a run.

    Ray exports a recorded value once, and drops it after two report intervals (20 s). Each value is therefore recorded
    again while the ranks report progress; a run that has ended disappears from the export. A Ray without metrics
    collection, such as the embedded one, ignores the values.
    """

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}
        self._labels: dict[str, str] = {}
        self._values: dict[str, float] = {}
        self._refresh_at = 0.0
        self._error_logged = False

    def emit(self, event: events.Event) -> None:
        """Export what ``event`` says."""
        try:
            self._emit(event)
        except Exception:
            if not self._error_logged:  # once, to keep a broken export from flooding the log
                self._error_logged = True
                logging.getLogger(__name__).exception("the Prometheus metrics cannot be exported")

    def _emit(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self._labels = {"run": event.name, "strategy": event.strategy, "job_name": event.job}
                self._gauges = {name: Gauge(name, text, tag_keys=LABELS) for name, text in GAUGES.items()}
            case events.GenerationStarted():
                self._record(orchestrator_workers=len(event.workers), orchestrator_restarts=event.generation - 1)
            case events.MetricsLogged() if LOSS.name in event.metrics:
                self._record(orchestrator_loss=event.metrics[LOSS.name], orchestrator_step=event.step)
                if SAMPLES_PER_S.name in event.metrics:  # the first point has no speed
                    self._record(orchestrator_samples_per_s=event.metrics[SAMPLES_PER_S.name])
            case events.RankProgress() if time.monotonic() >= self._refresh_at:
                self._record()

    def _record(self, **values: float) -> None:
        """Record all values, of which ``values`` are new."""
        self._values |= values
        self._refresh_at = time.monotonic() + REFRESH_S
        for name, value in self._values.items():
            self._gauges[name].set(value, tags=self._labels)
