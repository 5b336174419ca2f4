"""Which failure came first, and how the driver describes those that it finds itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from orchestrator.protocol.messages import Failure, Outcome

CauseOfDeath = Literal["out of memory", "node lost", "unknown"]
"""What Ray knows about the death of a process; it knows the cause only if it killed the process itself."""

_DEATHS: dict[CauseOfDeath, str] = {
    "out of memory": "was killed by Ray, because the node ran out of memory; lower the batch size or the model size",
    "node lost": "was lost with its node",
    "unknown": "died (killed from outside, out of memory, or crashed)",
}


def first_failure(outcomes: Mapping[int, Outcome]) -> int | None:
    """Return the rank whose failure caused the others; None if no rank failed.

    Failures of other ranks are broken connections, or errors found at a later step.
    """
    failed = {r: (o.failure.collateral, o.step, o.failure.time, r) for r, o in outcomes.items() if o.failure}
    return min(failed, key=failed.__getitem__, default=None)


def death(cause: CauseOfDeath, *, pid: int, hostname: str, time: float) -> Failure:
    """Describe a process that died. ``time`` is in seconds since the epoch, here and below."""
    return _seen_by_driver(f"its process {pid} on {hostname} {_DEATHS[cause]}", time)


def silence(timeout_s: float, *, pid: int, hostname: str, time: float) -> Failure:
    """Describe a process that no longer answers."""
    return _seen_by_driver(
        f"its process {pid} on {hostname} has not answered for {timeout_s:g} s (cluster.heartbeat_timeout_s)", time
    )


def node_loss(timeout_s: float, *, hostname: str, time: float) -> Failure:
    """Describe a process whose node no longer answers."""
    return _seen_by_driver(f"its node {hostname} has not answered for {timeout_s:g} s (cluster.node_timeout_s)", time)


def hang(stalled_s: float, why: str, *, stacks: str, time: float) -> Failure:
    """Describe a process that was killed because it made no progress.

    ``why`` says why this process is to blame, ``stacks`` is the file with the stacks of all ranks.
    """
    return _seen_by_driver(f"no progress for {stalled_s:.0f} s: {why}; stacks of all ranks: {stacks}", time)


def too_slow(slower_by: float, *, time: float) -> Failure:
    """Describe a process that was killed because it slowed the others down, by the factor ``slower_by``."""
    return _seen_by_driver(f"it was {slower_by:.1f} times slower than the others (recovery.replace_stragglers)", time)


def standstill(timeout_s: float, *, time: float) -> Failure:
    """Describe a process that answers and makes no progress, until the others time out in a collective operation."""
    return _seen_by_driver(
        f"no progress while the others waited {timeout_s:g} s for it (cluster.collective_timeout_s)", time
    )


def _seen_by_driver(message: str, time: float) -> Failure:
    return Failure(message=message, traceback="", time=time, collateral=False, log_tail="")
