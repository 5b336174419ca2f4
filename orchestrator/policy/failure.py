"""Which failure came first, and what to say of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from orchestrator.protocol.messages import Failure, Outcome


def first_failure(outcomes: Mapping[int, Outcome]) -> int | None:
    """The rank whose fault it was: broken connections are what the others suffered from it, and so is
    what they found wrong at a later step."""
    failed = {r: (o.failure.collateral, o.step, o.failure.time, r) for r, o in outcomes.items() if o.failure}
    return min(failed, key=failed.__getitem__, default=None)


CauseOfDeath = Literal["out of memory", "node lost", "unknown"]
"""What Ray knows of the end of a process: the cause only where it ended the process itself."""

_DEATHS: dict[CauseOfDeath, str] = {
    "out of memory": "was killed by Ray, because the node ran out of memory; lower the batch or the model",
    "node lost": "is gone with its node",
    "unknown": "died (killed from outside, out of memory, or crashed)",
}


def death(cause: CauseOfDeath, *, pid: int, hostname: str, time: float) -> Failure:
    """A process that is gone."""
    how = _DEATHS[cause]
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


def node_loss(timeout_s: float, *, hostname: str, time: float) -> Failure:
    """A process whose machine no longer answers."""
    return Failure(
        message=f"its node {hostname} has not answered for {timeout_s:g} s (cluster.node_timeout_s)",
        traceback="",
        time=time,
        collateral=False,
        log_tail="",
    )


def hang(message: str, *, time: float) -> Failure:
    """A process that was ended because it did not get on; ``message`` says since when and how that is known."""
    return Failure(message=message, traceback="", time=time, collateral=False, log_tail="")


def too_slow(slower_by: float, *, time: float) -> Failure:
    """A process that was ended because it held the others up."""
    message = f"it was {slower_by:.1f} times slower than the others (recovery.replace_stragglers)"
    return Failure(message=message, traceback="", time=time, collateral=False, log_tail="")


def standstill(timeout_s: float, *, time: float) -> Failure:
    """A process that answers and does not get on, while the others waited for it."""
    return Failure(
        message=f"it stands still: the others waited {timeout_s:g} s for it (cluster.collective_timeout_s)",
        traceback="",
        time=time,
        collateral=False,
        log_tail="",
    )
