"""Whether this node sees the run directory that the driver has created."""

from __future__ import annotations

import socket
import time

from orchestrator.records.run_dir import RunDir

POLL_S = 0.2


class NotSharedError(ValueError):
    """The driver and this node see different directories; the text says what to change."""


def check_shared(run_dir: RunDir, uid: str, *, output_dir: str, timeout_s: float) -> None:
    """Check that the record of the run ``uid`` is in ``run_dir``.

    Without it, this node would write checkpoints that no other node finds, and the fence could not keep a worker that
    is cut off from saving.

    Args:
        run_dir: the path that the driver has given.
        uid: the id of the run.
        output_dir: the key ``output_dir``, for the message.
        timeout_s: how long to wait for the record, because NFS may show a new directory late.

    Raises:
        NotSharedError: another directory, or none, has this path here.
    """
    deadline = time.monotonic() + timeout_s
    while not _has_record(run_dir, uid):
        if time.monotonic() >= deadline:
            raise NotSharedError(
                f"output_dir={output_dir} is not shared: the node {socket.gethostname()} does not see this run there. "
                "Set output_dir to a directory that all nodes of the run share, such as one on NFS, or to a URL of an "
                "object store, such as s3://bucket/runs; or run on one node"
            )
        time.sleep(POLL_S)


def _has_record(run_dir: RunDir, uid: str) -> bool:
    try:
        return bool(run_dir.read_record().get("uid") == uid)
    except (OSError, ValueError):
        return False
