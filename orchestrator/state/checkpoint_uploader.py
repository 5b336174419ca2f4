"""A background thread that uploads checkpoints, so that a slow store delays neither training nor the next write."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.state.best import BestSoFar
from orchestrator.state.checkpoint import list_checkpoints, remove_staging, remove_stale, step_of
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.fence import Fence, FencedError
from orchestrator.state.manifest import CheckpointError
from orchestrator.state.part_writers import PartError, StagedPart
from orchestrator.storage.remote import StorageError


@dataclass(frozen=True, kw_only=True)
class Written:
    """A checkpoint that is complete on disk at ``path``, or a ``part`` of it.

    Attributes:
        seconds: the duration of the write, with its upload.
        stall_ms: how long training stood still for the snapshot.
        best: the best evaluation so far, whose checkpoint is kept beside the newest ones; None if none is followed.
        part: what this rank has staged of a checkpoint for a store that several ranks write; None of a whole one.
    """

    step: int
    path: Path
    seconds: float
    stall_ms: float
    size_bytes: int
    best: BestSoFar | None = None
    part: StagedPart | None = None


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A checkpoint that is being written. ``progress`` counts the parts that have been written."""

    step: int
    progress: int


@dataclass(frozen=True, kw_only=True)
class WriteFailed:
    """A checkpoint that could not be written, and why."""

    step: int
    reason: str


FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 15.0
"""The intervals at which a store that is away is tried again."""


class CheckpointUploader:
    """Uploads what has been written to ``root``, one checkpoint after another, and keeps the newest ``keep`` of them.

    A checkpoint whose upload fails is tried again until a newer one has been written, the best one until there is a
    better one, or until the process ends. Local ones that are older than the last one uploaded are removed.

    Args:
        root: the local directory of the checkpoints.
        store: where they go.
        keep: the number of checkpoints to keep on the store, at least 1.
        fence: consulted before each checkpoint becomes visible. None if this process may always save.
        on_result: called on the thread for each upload that has ended.
    """

    def __init__(
        self,
        root: Path,
        store: CheckpointStore,
        *,
        keep: int,
        fence: Fence | None,
        on_result: Callable[[Written | WriteFailed], None],
    ):
        self._root = root
        self._store = store
        self._keep = keep
        self._fence = fence
        self._on_result = on_result
        self._changed = threading.Condition()
        self._waiting: list[Written] = []  # the newest is the last; one of the best evaluation may stand before it
        self._uploading: Written | None = None
        self._stored: set[int] = set()  # the steps of those that this process has uploaded
        self._progress = 0
        self._problem: str | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="checkpoint-uploader", daemon=True)
        self._thread.start()

    def submit(self, written: Written) -> None:
        """Queue a checkpoint for its upload. It replaces those that wait, except the best."""
        with self._changed:
            best_step = self._best_here(written)
            replaced = [older for older in self._waiting if older.step != best_step]
            self._waiting = [older for older in self._waiting if older not in replaced] + [written]
            self._changed.notify_all()
        for older in replaced:
            self._end(older, _replaced(older, written))

    def pending(self) -> Pending | None:
        """Return the newest checkpoint that is not on the store yet, or None."""
        with self._changed:
            newest = self._waiting[-1] if self._waiting else self._uploading
            return None if newest is None else Pending(step=newest.step, progress=self._progress)

    def problem(self) -> str | None:
        """Return why the last attempt failed, None if it did not."""
        return self._problem

    def close(self, timeout_s: float) -> None:
        """End the thread when all is uploaded; wait up to ``timeout_s`` for that."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (written := self._next()) is not None:
            result = self._upload(written)
            with contextlib.suppress(OSError):  # the next checkpoint tries again
                if isinstance(result, Written) and _reports(written):
                    self._store.prune(self._keep, saved_step=written.step, best=written.best)
            self._remove_older_here(written.step)
            self._end(written, result)
            with self._changed:
                self._uploading = None
                self._changed.notify_all()

    def _next(self) -> Written | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            self._uploading = self._waiting.pop(0) if self._waiting else None
            return self._uploading

    def _upload(self, written: Written) -> Written | WriteFailed:
        began, pause_s = time.perf_counter(), FIRST_PAUSE_S
        while True:
            try:
                size_bytes = self._try_upload(written)
            except StorageError as e:
                self._problem = str(e)
            except (FencedError, PartError, CheckpointError) as e:
                return WriteFailed(step=written.step, reason=str(e))
            except Exception as e:  # a bug must not end the thread, because the end of the run would wait for it
                return WriteFailed(step=written.step, reason=f"{type(e).__name__}: {e}")
            else:
                self._problem = None
                self._stored.add(written.step)
                seconds = written.seconds + time.perf_counter() - began
                return replace(written, seconds=seconds, size_bytes=size_bytes)
            with self._changed:
                if self._changed.wait_for(
                    lambda: bool(self._waiting) and self._best_here(self._waiting[-1]) != written.step, pause_s
                ):
                    return _replaced(written, self._waiting[-1], why=self._problem)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _try_upload(self, written: Written) -> int:
        """Upload a checkpoint, or this rank's part of it, and return its size in bytes as far as it is known here."""
        part = written.part
        if part is None:
            self._store.upload(written.path.name, fence=self._fence, on_progress=self._count_progress)
            return written.size_bytes
        size_bytes = part.jointly.upload(part, self._store, fence=self._fence, on_progress=self._count_progress)
        return written.size_bytes if size_bytes is None else size_bytes

    def _end(self, written: Written, result: Written | WriteFailed) -> None:
        """Let the others know that this rank has not uploaded its part, and report the result if no other rank does."""
        if written.part is not None:
            if isinstance(result, WriteFailed):
                written.part.jointly.decline(result.reason)
            remove_staging(written.part.directory)
        if _reports(written):
            self._on_result(result)

    def _best_here(self, newest: Written) -> int | None:
        """Return the step of the best checkpoint that still has to be uploaded; None if the best is on the store."""
        if newest.best is None or newest.best.step in self._stored:
            return None
        here = {one.step: one.best for one in (self._uploading, *self._waiting, newest) if one is not None}
        return newest.best.among(here, here.__getitem__).step

    def _count_progress(self) -> None:
        self._progress += 1

    def _remove_older_here(self, step: int) -> None:
        for path in list_checkpoints(self._root):
            with self._changed:
                is_needed = path in [written.path for written in self._waiting]
            if step_of(path.name) < step and not is_needed:
                shutil.rmtree(path, ignore_errors=True)
        remove_stale(self._root)


def _reports(written: Written) -> bool:
    """Return whether this rank reports how the upload ends."""
    return written.part is None or written.part.jointly.commits


def _replaced(older: Written, newer: Written, *, why: str | None = None) -> WriteFailed:
    reason = f"it was not uploaded before the one of step {newer.step} was written"
    return WriteFailed(step=older.step, reason=f"{reason} ({why})" if why else reason)
