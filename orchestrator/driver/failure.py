"""Which failure came first, and what to say of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import ray.exceptions

from orchestrator.messages import Failure, Outcome


def first_failure(outcomes: Mapping[int, Outcome]) -> int | None:
    """The rank whose fault it was: broken connections are what the others suffered from it."""
    failed = {r: o.failure for r, o in outcomes.items() if o.failure is not None}
    if not failed:
        return None
    return min(failed, key=lambda rank: (failed[rank].collateral, failed[rank].time, rank))


def death(error: Exception, *, pid: int, hostname: str, time: float) -> Failure:
    """A process that is gone. Ray knows the cause only where it ended the process itself."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        how = "was killed by Ray, because the node ran out of memory; lower the batch or the model"
    elif isinstance(error, ray.exceptions.NodeDiedError):
        how = "is gone with its node"
    else:
        how = "died (killed from outside, out of memory, or crashed)"
    return Failure(
        message=f"its process {pid} on {hostname} {how}",
        traceback="",
        time=time,
        collateral=False,
        log_tail="",
    )


def silence(timeout_s: float, *, pid: int, hostname: str, time: float) -> Failure:
    """A process that no longer answers."""
    return Failure(
        message=(f"its process {pid} on {hostname} has not answered for {timeout_s:g} s (cluster.heartbeat_timeout_s)"),
        traceback="",
        time=time,
        collateral=False,
        log_tail="",
    )
