"""A request to stop a run, as a file in its directory: it reaches the driver on whatever host that is."""

from __future__ import annotations

import json

from orchestrator.records.json_file import write_json
from orchestrator.records.run_dir import RunDir


def request_stop(run_dir: RunDir, *, by: str) -> None:
    """Ask the driver that the record of a run names to stop, as SIGTERM would. No later driver of the run obeys.

    ``by``: the user who asks, and their host.

    Raises:
        OSError: the directory or the store cannot be written.
        ValueError: the record is damaged.
    """
    request = {"by": by, "started": run_dir.read_record().get("started")}
    if run_dir.remote is None:
        write_json(run_dir.stop_file, request)
    else:
        run_dir.remote.write(run_dir.stop_file.name, json.dumps(request).encode())


def stop_requested_by(run_dir: RunDir) -> str | None:
    """Return who has asked the driver that the record of a run names to stop, None if nobody has.

    Raises:
        OSError: the directory or the store cannot be read.
        ValueError: the request or the record is damaged.
    """
    try:
        local, remote = run_dir.stop_file, run_dir.remote
        text = local.read_bytes() if remote is None else remote.read(local.name)
    except FileNotFoundError:
        return None
    request = json.loads(text)
    return str(request["by"]) if request.get("started") == run_dir.read_record().get("started") else None
