"""What runs leave in the GCS server of a cluster: metadata of their jobs, and their output directories.

The metadata is for Ray's dashboard and ``ray job list``. By the directories, ``orchestrator runs --address`` finds the
runs of all users, also those that have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from orchestrator.compat.ray.cluster import add_job_metadata, cluster_values, put_cluster_value
from orchestrator.compat.ray.connection import is_own_ray
from orchestrator.config.build import ConfigError
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.driver.process import cluster
from orchestrator.protocol.events import (
    Event,
    RunEnded,
    RunStarted,
    StateChanged,
    WaitingForResources,
    WaitingInQueue,
    Yielded,
)
from orchestrator.records.output_dir import OutputDir, find_run
from orchestrator.records.run_dir import RunDir
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


def job_state(event: Event) -> str | None:
    """Return the state of a run after ``event``, with what it waits for; None if the event does not change it."""
    match event:
        case RunStarted():
            return "waiting"
        case WaitingInQueue():
            return "waiting: without a place" if event.unfit else f"waiting: place {len(event.ahead) + 1}"
        case WaitingForResources():
            return f"waiting: {event.wanted}"
        case Yielded():
            return f"waiting: yielded to {event.to}"
        case StateChanged():
            return event.state
        case RunEnded():
            return event.status.lower()
    return None


class JobStateSink:
    """An event sink that keeps the state of a run in the metadata of its job, if it was submitted as one."""

    def __init__(self) -> None:
        self._state = ""

    def emit(self, event: Event) -> None:
        """Write the state if ``event`` changes it."""
        state = job_state(event)
        if state is not None and state != self._state:
            self._state = state
            with contextlib.suppress(Exception):  # of any type: what the dashboard shows must not end a run
                add_job_metadata({"state": state})

    def close(self) -> None:
        """Do nothing: every change has been written."""


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
