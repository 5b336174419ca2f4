"""The wait for the last checkpoints of a run, which its workers still write when their training has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from orchestrator.config.schema import Config
from orchestrator.driver.gang.gang import Gang
from orchestrator.driver.process.signals import StopSignals
from orchestrator.protocol.events import CheckpointFailed
from orchestrator.protocol.messages import PendingCheckpoint
from orchestrator.worker.actor import Worker

POLL_S = 2.0
"""Ask this often whether a worker still writes its last checkpoint."""


def wait_for_last_checkpoints(
    gang: Gang, ranks: Collection[int], config: Config, stop: StopSignals, check: Callable[[], None]
) -> list[CheckpointFailed]:
    """Let ``ranks`` finish their checkpoints, for as long as bytes are being written.

    Returns:
        The checkpoints that were not written in time.

    Raises:
        GangError: Ray is dead.
        RayError: see :meth:`Gang.poll`.
    """
    grace_s = config.cluster.stop_grace_s
    writing: Mapping[int, PendingCheckpoint] = {}
    progressed_at = time.monotonic()
    while ranks:
        answers = gang.poll(Worker.finish, POLL_S, ranks=ranks, timeout_s=POLL_S + grace_s)
        before, writing = writing, {rank: pending for rank, pending in answers.items() if pending is not None}
        ranks = writing.keys()
        key, limit_s = "recovery.hang_max_s", config.recovery.hang_max_s
        if stop.received is not None:
            key, limit_s = "cluster.stop_grace_s", grace_s
        elif writing != before:
            progressed_at = time.monotonic()
        if time.monotonic() - progressed_at > limit_s:
            reason = f"it was not written in time ({key})"
            return [CheckpointFailed(step=pending.step, reason=reason) for pending in writing.values()]
        check()
    return []
