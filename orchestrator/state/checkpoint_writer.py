"""Checkpoints written in the background: training waits for the copy to host memory alone."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.state.checkpoint import prune, save
from orchestrator.state.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class Written:
    step: int
    path: Path
    seconds: float
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class WriteFailed:
    step: int
    reason: str


class CheckpointWriter:
    """Saves snapshots below ``root`` on one thread and keeps the newest ``keep``; none unless it ``may_save``.

    With ``capture(..., into=writer.buffers())`` before each :meth:`submit` there are at most two
    snapshots in memory: one being written, one being filled. All methods are for one thread.
    """

    def __init__(self, root: Path, *, keep: int, run_uid: str, may_save: Callable[[], bool] = lambda: True):
        self._root = root
        self._may_save = may_save
        self._keep = keep
        self._run_uid = run_uid
        self._changed = threading.Condition()
        self._pending: TrainState | None = None  # from submit() until it is written
        self._free: list[TrainState] = []
        self._results: list[Written | WriteFailed] = []
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def submit(self, state: TrainState, *, timeout_s: float = 60.0) -> None:
        """Have ``state`` written; it belongs to the writer from here on.

        Waits for the write before it, at most ``timeout_s``, and gives this one up after that.
        """
        with self._changed:
            assert not self._closing, "submit() after close()"
            if not self._changed.wait_for(lambda: self._pending is None, timeout_s):
                assert self._pending is not None
                reason = f"step {self._pending.step} is still being written after {timeout_s:g} s"
                self._results.append(WriteFailed(step=state.step, reason=reason))
                self._free = [state]
                return
            self._pending = state
            self._changed.notify_all()

    def buffers(self) -> TrainState | None:
        """A snapshot that is written, to be overwritten by the next ``capture``."""
        with self._changed:
            return self._free.pop() if self._free else None

    def results(self) -> list[Written | WriteFailed]:
        """What has ended since the last call, in order."""
        with self._changed:
            ended, self._results = self._results, []
            return ended

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything submitted has ended; False if it has not by then."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending is None, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Drain and end the thread; False if a write is still going on after ``timeout_s``."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._changed:
                # No timeout: idle until the next submit() or close().
                self._changed.wait_for(lambda: self._pending is not None or self._closing)
                state = self._pending
            if state is None:
                return
            result = self._write(state)
            with self._changed:
                self._results.append(result)
                self._free = [state]
                self._pending = None
                self._changed.notify_all()

    def _write(self, state: TrainState) -> Written | WriteFailed:
        start = time.perf_counter()
        try:
            path = save(self._root, state, run_uid=self._run_uid, may_save=self._may_save)
        except OSError as e:
            return WriteFailed(step=state.step, reason=self._explain(e, state))
        except Exception as e:  # a bug must not end the thread, which submit() would wait for
            return WriteFailed(step=state.step, reason=f"{type(e).__name__}: {e}")
        seconds = time.perf_counter() - start
        prune(self._root, self._keep)
        return Written(step=state.step, path=path, seconds=seconds, size_bytes=state.size_bytes)

    def _explain(self, error: OSError, state: TrainState) -> str:
        size = f"the checkpoint takes {state.size_bytes / 1e6:.0f} MB"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self._root).free / 1e6
            return f"disk full: {size}, {self._root} has {free:.0f} MB free"
        if error.errno == errno.EFBIG:
            return f"file too large for this file system or its limit (ulimit -f): {size}"
        return f"{error.strerror}: {error.filename or self._root}"
