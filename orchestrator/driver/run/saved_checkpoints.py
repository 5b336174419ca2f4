"""The checkpoints of a run, as far as the driver knows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchestrator.protocol.events import CheckpointFailed, CheckpointSaved
from orchestrator.records.run_dir import RunDir
from orchestrator.state.checkpoint import path_of
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.manifest import CheckpointError, read_manifest
from orchestrator.storage.remote import StorageError


class SavedCheckpoints:
    """Follows what the workers report of checkpoints, and looks for those that they could not report.

    Attributes:
        newest: the last checkpoint that was saved, or that the run resumes from; None if there is none.
        step: its step; 0 if there is none.
    """

    def __init__(self, run_dir: RunDir, newest: Path | None, *, step: int):
        self.newest = newest
        self.step = step
        self._directory = run_dir.checkpoints
        self._is_remote = run_dir.remote is not None
        self._store = CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints)
        self._failed: dict[int, str] = {}  # by step: why

    def record(self, event: CheckpointSaved | CheckpointFailed) -> None:
        """Take note of a checkpoint that was saved or could not be."""
        if isinstance(event, CheckpointSaved):
            self.newest, self.step = path_of(self._directory, event.step), event.step
        else:
            self._failed[event.step] = event.reason

    def find_newest(self, warn: Callable[[str], None]) -> None:
        """Find the newest valid checkpoint, whose writer may have died before it could report it."""
        damaged: list[CheckpointError] = []
        try:
            newest = self._store.find_newest(damaged.append)
        except StorageError as e:
            newest = None
            warn(f"the newest checkpoint cannot be looked up: {e}")
        for error in damaged:
            warn(f"checkpoint skipped: {error}")
        if newest is not None:
            self.newest, self.step = newest, int(read_manifest(newest)["step"])

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
