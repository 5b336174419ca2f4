"""A request to stop a run, as a file in its directory: it reaches the driver on whatever host that is."""

from __future__ import annotations

import json
import socket

from orchestrator.records.json_file import write_json
from orchestrator.records.process import user_name
from orchestrator.records.run_dir import RunDir


def request_stop(run_dir: RunDir) -> None:
    """Ask the driver of a run to stop, as SIGTERM would.

    Raises:
        OSError: the directory or the store cannot be written.
    """
    request = {"by": f"{user_name()} on {socket.gethostname()}"}
    if run_dir.remote is None:
        write_json(run_dir.stop_file, request)
    else:
        run_dir.remote.write(run_dir.stop_file.name, json.dumps(request).encode())


def stop_requested_by(run_dir: RunDir) -> str | None:
    """Return who has asked the driver of a run to stop, None if nobody has.

    Raises:
        OSError: the directory or the store cannot be read.
    """
    try:
        local, remote = run_dir.stop_file, run_dir.remote
        text = local.read_bytes() if remote is None else remote.read(local.name)
    except FileNotFoundError:
        return None
    try:
        return str(json.loads(text)["by"])
    except (ValueError, TypeError, KeyError):
        return "somebody"


def clear_stop_request(run_dir: RunDir) -> None:
    """Remove the request that an earlier driver of the run has obeyed.

    Raises:
        OSError: the directory or the store cannot be written.
    """
    run_dir.stop_file.unlink(missing_ok=True)
    if run_dir.remote is not None:
        run_dir.remote.delete(run_dir.stop_file.name)
