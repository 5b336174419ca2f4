"""The checkpoints of a run, as far as the driver knows them, and the wait for the last ones."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path

from orchestrator.driver.gang.gang import Gang
from orchestrator.driver.process.run_context import RunContext
from orchestrator.protocol.events import CheckpointFailed, CheckpointSaved
from orchestrator.protocol.messages import PendingCheckpoint
from orchestrator.state.checkpoint import path_of
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.manifest import CheckpointError, read_manifest
from orchestrator.storage.remote import StorageError
from orchestrator.worker.base_actor import BaseWorker

POLL_S = 2.0
"""Ask this often whether a worker still writes its last checkpoint."""


class SavedCheckpoints:
    """Follows what the workers report of checkpoints, and looks for those that they could not report.

    Attributes:
        newest: the last checkpoint that was saved, or that the run resumes from; None if there is none.
        step: its step; 0 if there is none.
        remote: the directory on a store that ``newest`` has to be fetched from; None if it is on disk.
    """

    def __init__(self, context: RunContext):
        spec, run_dir = context.spec, context.spec.run_dir
        self.newest = spec.checkpoint
        self.remote = (spec.source or run_dir).remote_checkpoints
        self.step = spec.resumed_from_step or 0
        self._context = context
        self._directory = run_dir.checkpoints
        self._is_remote = run_dir.remote is not None
        self._store = CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints)
        self._failed: dict[int, str] = {}  # by step: why

    def record(self, event: CheckpointSaved | CheckpointFailed) -> None:
        """Take note of a checkpoint that was saved or could not be."""
        if isinstance(event, CheckpointSaved):
            self._set_newest(path_of(self._directory, event.step), event.step)
        else:
            self._failed[event.step] = event.reason

    def find_newest(self) -> None:
        """Find the newest valid checkpoint, whose writer may have died before it could report it."""
        damaged: list[CheckpointError] = []
        warn = self._context.events.warn
        try:
            newest = self._store.find_newest(damaged.append)
        except StorageError as e:
            newest = None
            warn(f"the newest checkpoint cannot be looked up: {e}")
        for error in damaged:
            warn(f"checkpoint skipped: {error}")
        if newest is not None:
            self._set_newest(newest, int(read_manifest(newest)["step"]))

    def why_missing(self, step: int) -> str | None:
        """Return why there is no checkpoint of ``step``, as a predicate; None if there is one."""
        if self.step == step:
            return None
        path = path_of(self._directory, step)
        try:
            if not self._is_remote:
                read_manifest(path)  # its writer may have died before its report
            elif path.name not in self._store.list():
                raise CheckpointError(self._store.location(path.name), "it is not on the store")
        except (CheckpointError, StorageError) as e:
            reason = self._failed.get(step)
            return f"was not confirmed: {e}" if reason is None else f"could not be written: {reason}"
        return None

    def wait_for_last(self, gang: Gang, ranks: Collection[int]) -> None:
        """Let ``ranks`` finish their checkpoints, for as long as bytes are being written, and report those that failed.

        Raises:
            GangError: Ray is dead.
            RayError: see :meth:`Gang.poll`.
        """
        config, stop = self._context.spec.config, self._context.stop
        grace_s = config.cluster.stop_grace_s
        writing: Mapping[int, PendingCheckpoint] = {}
        progressed_at = time.monotonic()
        while ranks:
            answers = gang.poll(BaseWorker.finish, POLL_S, ranks=ranks, timeout_s=POLL_S + grace_s)
            before, writing = writing, {rank: pending for rank, pending in answers.items() if pending is not None}
            ranks = writing.keys()
            key, limit_s = "recovery.hang_max_s", config.recovery.hang_max_s
            if stop.received is not None:
                key, limit_s = "cluster.stop_grace_s", grace_s
            elif writing != before:
                progressed_at = time.monotonic()
            if time.monotonic() - progressed_at > limit_s:
                for pending in writing.values():
                    event = CheckpointFailed(step=pending.step, reason=f"it was not written in time ({key})")
                    self._context.events.emit(event)
                    self.record(event)
                return
            self._context.lease.check()

    def _set_newest(self, path: Path, step: int) -> None:
        """Let the run's own checkpoint ``path`` be the newest one, in place of one of another run."""
        self.newest, self.step = path, step
        self.remote = self._context.spec.run_dir.remote_checkpoints
