"""A background thread that writes checkpoints, so that training waits only for the copy to host memory."""

from __future__ import annotations

import contextlib
import errno
import functools
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.state.best import BestSoFar
from orchestrator.state.checkpoint import path_of, save
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.checkpoint_uploader import CheckpointUploader, Pending, WriteFailed, Written
from orchestrator.state.fence import Fence, FencedError
from orchestrator.state.part_writers import JointSave, PartError
from orchestrator.state.train_state import TrainState
from orchestrator.storage.remote import Remote

_IDLE_WAIT_S = 5.0
_PROGRESS_POLL_S = 0.5


class CheckpointWriter:
    """Writes snapshots below ``root`` on one thread and keeps the newest ``keep`` checkpoints.

    The one of the best evaluation of which there is one, by the metadata of the last snapshot, is kept besides.

    At most two snapshots are in memory, one being written and one being filled, if each :meth:`submit` follows a
    ``capture(..., into=writer.buffers())``. All methods must be called from the same thread.
    """

    def __init__(
        self, root: Path, *, keep: int, run_uid: str, fence: Fence | None = None, remote: Remote | None = None
    ):
        """
        Args:
            root: the directory of the run's checkpoints; created if missing.
            keep: the number of checkpoints to keep, at least 1.
            run_uid: the identity of the run, recorded in each manifest.
            fence: consulted before each checkpoint becomes visible. None if this process may always save.
            remote: where the checkpoints go from ``root``; None if that is their place.
        """
        self._root = root
        self._store = CheckpointStore(root, remote)
        self._uploader = (
            None
            if remote is None
            else CheckpointUploader(root, self._store, keep=keep, fence=fence, on_result=self._add_result)
        )
        self._fence = fence
        self._keep = keep
        self._run_uid = run_uid
        self._changed = threading.Condition()
        self._pending: TrainState | None = None  # from submit() until the write has ended
        self._jointly: JointSave | None = None  # how it is written, unless by this rank alone
        self._stall_ms = 0.0
        self._progress = 0
        self._free: list[TrainState] = []
        self._results: list[Written | WriteFailed] = []
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def submit(
        self,
        state: TrainState,
        *,
        stalled_since: float | None = None,
        timeout_s: float = 60.0,
        jointly: JointSave | None = None,
    ) -> Pending | None:
        """Queue ``state`` for writing. The writer owns it from here on.

        Args:
            stalled_since: when training stopped for the snapshot, by ``time.perf_counter``; None if it stops now.
            timeout_s: how long to wait for the previous write.
            jointly: of which checkpoint ``state`` is a part; None if it is a whole one. Only the rank that commits such
                a checkpoint has a result of it.

        Returns:
            None; or the previous checkpoint, still being written after ``timeout_s``, for which ``state`` is skipped.
        """
        began = time.perf_counter() if stalled_since is None else stalled_since
        with self._changed:
            assert not self._closing, "submit() after close()"
            if not self._changed.wait_for(lambda: self._pending is None, timeout_s):
                assert self._pending is not None
                self._free = [state]
                return Pending(step=self._pending.step, progress=self._progress)
            self._pending, self._jointly = state, jointly
            self._stall_ms = (time.perf_counter() - began) * 1e3
            self._changed.notify_all()
            return None

    def buffers(self) -> TrainState | None:
        """Return a snapshot whose memory the next ``capture`` may overwrite, or None."""
        with self._changed:
            return self._free.pop() if self._free else None

    def results(self) -> list[Written | WriteFailed]:
        """Return the results since the previous call, in order."""
        with self._changed:
            results, self._results = self._results, []
            return results

    def pending(self) -> Pending | None:
        """Return the checkpoint that is being written or uploaded, or None."""
        with self._changed:
            if self._pending is not None:
                return Pending(step=self._pending.step, progress=self._progress)
        return None if self._uploader is None else self._uploader.pending()

    def upload_problem(self) -> str | None:
        """Return why the last upload failed; None if it did not, or if there are no uploads."""
        return None if self._uploader is None else self._uploader.problem()

    def drain(self, stall_timeout_s: float, *, on_progress: Callable[[], None] = lambda: None) -> Pending | None:
        """Wait until the submitted snapshot is written and uploaded, for as long as its bytes are on the way.

        Args:
            stall_timeout_s: give up if nothing has been written for this time.
            on_progress: called about twice a second while bytes are being written.

        Returns:
            The checkpoint that is not being written any further; None if all is written.
        """
        progressed_at = time.monotonic()
        last = self.pending()
        while last is not None:
            with self._changed:
                self._changed.wait_for(lambda: self.pending() is None, min(_PROGRESS_POLL_S, stall_timeout_s))
            current = self.pending()
            if current != last:
                progressed_at = time.monotonic()
                on_progress()
            elif time.monotonic() - progressed_at >= stall_timeout_s:
                return current
            last = current
        return None

    def amend(self, step: int, meta: Mapping[str, Any]) -> None:
        """Replace entries of the metadata of the newest checkpoint, that of ``step``, when nothing is being written.

        Raises:
            FencedError: this process may no longer save.
            CheckpointError: the checkpoint is damaged or missing.
            OSError, ValueError: the checkpoint cannot be written.
        """
        self._store.amend(path_of(self._root, step).name, meta, fence=self._fence)
        with contextlib.suppress(OSError):
            self._store.prune(self._keep, saved_step=step, best=BestSoFar.from_meta(meta))

    def close(self, timeout_s: float) -> Pending | None:
        """End the threads after the pending write and upload. Return what takes longer than ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._uploader is not None and not self._thread.is_alive():
            self._uploader.close(max(0.0, deadline - time.monotonic()))
        return self.pending()

    def _work(self) -> None:
        while (state := self._next()) is not None:
            result: Written | WriteFailed | None = WriteFailed(step=state.step, reason="the writing thread ended")
            try:
                result = self._write(state)
            finally:
                if self._uploader is not None and isinstance(result, Written):
                    self._uploader.submit(result)
                elif result is not None and (self._jointly is None or self._jointly.commits):  # others are silent
                    self._add_result(result)
                with self._changed:
                    self._free = [state]
                    self._pending = self._jointly = None
                    self._changed.notify_all()
        if self._uploader is not None:
            self._uploader.close(0.0)

    def _add_result(self, result: Written | WriteFailed) -> None:
        with self._changed:
            self._results.append(result)

    def _next(self) -> TrainState | None:
        """Wait for a snapshot; None after :meth:`close` if none is pending."""
        with self._changed:
            while self._pending is None and not self._closing:
                self._changed.wait(_IDLE_WAIT_S)
            return self._pending

    def _write(self, state: TrainState) -> Written | WriteFailed | None:
        start, size_bytes, part = time.perf_counter(), state.size_bytes, None
        explain = functools.partial(self._explain, state=state)
        try:
            # Of a checkpoint that is uploaded, only the copy on the store is visible to others.
            fence = self._fence if self._uploader is None else None
            if self._jointly is None:
                path = save(self._root, state, run_uid=self._run_uid, fence=fence, on_progress=self._count_progress)
            elif self._uploader is not None:
                path = path_of(self._root, state.step)
                part = self._jointly.stage(
                    self._root, state, run_uid=self._run_uid, explain=explain, on_progress=self._count_progress
                )
            else:
                saved = self._jointly.save(
                    self._root,
                    state,
                    run_uid=self._run_uid,
                    fence=fence,
                    explain=explain,
                    on_progress=self._count_progress,
                )
                if saved is None:
                    return None
                path, size_bytes = saved
        except (FencedError, PartError) as e:
            return WriteFailed(step=state.step, reason=str(e))
        except OSError as e:
            return WriteFailed(step=state.step, reason=self._explain(e, state))
        except Exception as e:  # a bug must not end the thread, because training would wait for it
            return WriteFailed(step=state.step, reason=f"{type(e).__name__}: {e}")
        seconds, best = time.perf_counter() - start, BestSoFar.from_meta(state.meta)
        if self._uploader is None:
            with contextlib.suppress(OSError):  # the next checkpoint tries again
                self._store.prune(self._keep, saved_step=state.step, best=best)
        return Written(
            step=state.step,
            path=path,
            seconds=seconds,
            stall_ms=self._stall_ms,
            size_bytes=size_bytes,
            best=best,
            part=part,
        )

    def _count_progress(self) -> None:
        self._progress += 1

    def _explain(self, error: OSError, state: TrainState) -> str:
        size = f"the checkpoint takes {state.size_bytes / 1e6:.0f} MB"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self._root).free / 1e6
            return f"disk full: {size}, {self._root} has {free:.0f} MB free"
        if error.errno == errno.EFBIG:
            return f"file too large for this file system or its limit (ulimit -f): {size}"
        return f"{error.strerror}: {error.filename or self._root}"
