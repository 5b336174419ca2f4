"""The output directories of the runs on a cluster, which its GCS server keeps as long as it lives.

Each driver enters the directory of its run there, so that ``orchestrator runs --address`` finds the runs of all users,
also those that have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from orchestrator.compat.ray.cluster import cluster_values, put_cluster_value
from orchestrator.compat.ray.connection import is_own_ray
from orchestrator.config.build import ConfigError
from orchestrator.config.redact import Redactor
from orchestrator.driver.process import cluster
from orchestrator.records.output_dir import OutputDir, find_run
from orchestrator.records.run_dir import RunDir
from orchestrator.storage.remote import is_url

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
