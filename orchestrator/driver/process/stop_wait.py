"""How long Ray waits for a submitted job that it stops, between SIGTERM and SIGKILL."""

from __future__ import annotations

import math
from collections.abc import Mapping

STOP_WAIT_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
"""Ray reads it in the environment of the job."""
DEFAULT_STOP_WAIT_S = 3
"""That of Ray."""
STOP_MARGIN_S = 10
"""What the driver needs after ``cluster.stop_grace_s``, to release its workers and write its records."""


def needed_stop_wait_s(stop_grace_s: float) -> int:
    """Return how long Ray has to wait for a run with this ``cluster.stop_grace_s``, in whole seconds."""
    return math.ceil(stop_grace_s) + STOP_MARGIN_S


def stop_wait_warning(stop_grace_s: float, environment: Mapping[str, str]) -> str | None:
    """Return a warning if Ray may kill a stopped job before the last checkpoint of a run; None if it waits long enough.

    Args:
        stop_grace_s: ``cluster.stop_grace_s`` of the run.
        environment: the environment of the job.
    """
    given = environment.get(STOP_WAIT_VARIABLE, "")
    wait_s = int(given) if given.isdecimal() else DEFAULT_STOP_WAIT_S
    needed_s = needed_stop_wait_s(stop_grace_s)
    if wait_s >= needed_s:
        return None
    return (
        f"`ray job stop` kills this job after {wait_s} s, and the last checkpoint of a run may take longer "
        f"(cluster.stop_grace_s={stop_grace_s:g}): use `orchestrator submit`, or set {STOP_WAIT_VARIABLE}={needed_s} "
        "in the runtime environment of the job"
    )
