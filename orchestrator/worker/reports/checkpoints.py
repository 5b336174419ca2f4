"""Checkpoints of a run, as the training loop sees them: snapshot, write in the background, report."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed import Store

from orchestrator.config.schema import Config
from orchestrator.protocol.events import CheckpointFailed, CheckpointSaved
from orchestrator.protocol.messages import Assignment, PendingCheckpoint
from orchestrator.records.lease import restored_within_s
from orchestrator.records.run_dir import RunDir
from orchestrator.state.best import BestSoFar
from orchestrator.state.checkpoint import path_of
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.checkpoint_uploader import WriteFailed
from orchestrator.state.checkpoint_writer import CheckpointWriter
from orchestrator.state.fence import Fence, FencedError
from orchestrator.state.manifest import KINDS, CheckpointError
from orchestrator.state.part_writers import JointSave, Writers
from orchestrator.state.tensor_file import header_text
from orchestrator.strategies.base import Strategy
from orchestrator.worker.control.control import Outbox, Warner
from orchestrator.worker.measure.step_metrics import NonFiniteError

BUSY_WAIT_S = 2.0
"""How long training waits for the previous write before it skips a checkpoint."""
_LIMIT = "recovery.hang_max_s is the limit"


class Checkpoints:
    """Takes snapshots of the training state and has them written on a background thread.

    Attributes:
        on_saved: called with each checkpoint that is complete, where it is reported.
    """

    on_saved: Callable[[CheckpointSaved], None] = staticmethod(lambda event: None)

    def __init__(self, assignment: Assignment, *, strategy: Strategy, outbox: Outbox, warner: Warner):
        run_dir, config = RunDir(Path(assignment.run_dir), assignment.remote), assignment.config
        self._run_dir = run_dir
        self._strategy = strategy
        self._outbox = outbox
        self._warner = warner
        self._timeout_s = config.recovery.hang_max_s
        self._lost_timeout_s = lost_timeout_s(config)
        self._given_up: int | None = None  # the step of a checkpoint whose write stalled
        self._failed: set[int] = set()  # the steps of those that could not be written
        self._store = CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints)
        self._writers: Writers | None = None  # None if rank 0 writes alone
        self._num_saves = 0
        self._rank = assignment.global_rank
        self._fence = Fence(
            run_dir.fence_file, assignment.fence, remote=run_dir.remote, restored_within_s=restored_within_s(run_dir)
        )
        self._writer = CheckpointWriter(
            run_dir.checkpoints,
            keep=config.checkpoint.keep,
            run_uid=assignment.run_uid,
            fence=self._fence,
            remote=run_dir.remote_checkpoints,
        )

    def reassign(self, assignment: Assignment) -> None:
        """Continue in the generation of ``assignment``."""
        self._fence.token = assignment.fence
        self._rank = assignment.global_rank
        self.end_generation()

    def end_generation(self) -> None:
        """Wait no longer for parts of other ranks that make no progress."""
        if self._writers is not None:
            self._writers.ended.set()
            self._writers = None

    def attach(self, store: Store | None) -> None:
        """Begin a generation, after the strategy is attached.

        ``store``: where the ranks of the generation can leave short messages; None if they cannot.
        """
        strategy = self._strategy
        if store is not None and len(strategy.saved.writers) > 1:
            self._num_saves = 0
            self._writers = Writers(
                store=store,
                ranks=strategy.saved.writers,
                rank=self._rank,
                names=strategy.saved.names,
                stall_timeout_s=self._timeout_s,
                lost_timeout_s=self._lost_timeout_s,
                ended=threading.Event(),
            )

    def save(self, *, step: int, samples_consumed: int, last: bool, metadata: Mapping[str, Any]) -> None:
        """Take a snapshot after ``step`` and submit it for writing. All ranks call this at the same step.

        The last snapshot and the one of the best evaluation wait for the previous write. Any other waits at most
        ``BUSY_WAIT_S`` and is then skipped.

        Args:
            step: the last completed step.
            samples_consumed: global samples consumed up to that step.
            last: whether no step follows.
            metadata: JSON values to keep in the manifest, beside the values of the strategy.

        Raises:
            NonFiniteError: a parameter is not finite; nothing is saved.
        """
        began = time.perf_counter()
        position, part = {"step": step, "samples_consumed": samples_consumed}, self._writers is not None
        with self._strategy.quiesced():
            state = self._strategy.capture(**position, into=self._writer.buffers(), part=part)
        self._strategy.hooks.confirm()
        if state is not None:
            jointly = self._joint_save()
            state.meta.update(metadata)
            # A gradient can be NaN although the loss is finite, and the gradient norm is not always computed.
            if (name := state.nonfinite_parameter) is not None:
                reason = f"the parameter {name} is no longer finite"
                if jointly is not None:
                    jointly.decline(reason)
                raise NonFiniteError(reason, step)
            if last:
                self._outbox.enter(step, "end")  # this wait may take any time
                self.drain()
                self._outbox.enter(step, "checkpoint")
            best = BestSoFar.from_meta(metadata)
            is_needed = last or (best is not None and best.step == step)
            timeout_s = self._limit_s / 2 if is_needed else min(BUSY_WAIT_S, self._limit_s / 2)
            busy_with = self._writer.submit(state, stalled_since=began, timeout_s=timeout_s, jointly=jointly)
            if busy_with is not None:
                self._report_skipped(step, busy_with.step, timeout_s=timeout_s, last=last, jointly=jointly)

    def try_out(self, metadata: Mapping[str, Any]) -> None:
        """Make all of this rank's part of a checkpoint but the copies of its tensors and the files.

        Raises:
            ValueError: a part of the state cannot be saved.
        """
        state = self._strategy.state_to_save()
        if state is not None:
            json.dumps({**state.meta, **metadata})
            for kind in KINDS:
                header_text(getattr(state, kind), state.boxes.get(kind))

    def _joint_save(self) -> JointSave | None:
        """Return the next checkpoint of several writers; None if rank 0 writes alone."""
        self._num_saves += 1
        return None if self._writers is None else self._writers.joint_save(f"checkpoint-{self._num_saves}")

    def _report_skipped(
        self, step: int, before: int, *, timeout_s: float, last: bool, jointly: JointSave | None
    ) -> None:
        """Report that there is no checkpoint of ``step``, because the one of the step ``before`` is not written yet."""
        self._failed.add(step)
        reason = f"step {before} is still being written after {timeout_s:g} s"
        if jointly is not None:
            jointly.decline(reason)
            if not jointly.commits:
                return  # the rank that commits reports
        if last:
            self._outbox.put_event(CheckpointFailed(step=step, reason=reason))
        else:
            self._warner.warn(
                f"the checkpoint of step {step} is skipped: {reason}; raise checkpoint.every", topic="busy writer"
            )

    def report(self) -> None:
        """Put an event into the outbox for each write that has ended since the last call."""
        for result in self._writer.results():
            if isinstance(result, WriteFailed):
                self._failed.add(result.step)
                self._outbox.put_event(CheckpointFailed(step=result.step, reason=result.reason))
            else:
                self._failed.discard(result.step)
                event = CheckpointSaved(
                    step=result.step,
                    path=self._run_dir.location_of(result.path),
                    seconds=result.seconds,
                    stall_ms=result.stall_ms,
                    size_bytes=result.size_bytes,
                )
                self._outbox.put_event(event)
                self.on_saved(event)

    def saved(self, best: BestSoFar) -> BestSoFar:
        """Return ``best``, or the best evaluation that is saved if the checkpoint of ``best`` could not be written.

        Called on the rank that commits, whose process may have replaced the one that wrote it.
        """
        self.report()
        pending = self._writer.pending()
        if best.value is not None and pending is not None and pending.step >= best.step:
            return best
        on_store = self._run_dir.remote is not None  # which may be slow to say whether it is there
        kept = best.step not in self._failed and (on_store or path_of(self._run_dir.checkpoints, best.step).exists())
        if best.value is not None and kept:
            return best
        with contextlib.suppress(OSError):  # the store is away
            return self._store.best_saved(best)
        return best

    def amend(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Enter metadata into the newest checkpoint, that of ``step``, which was saved before they were known.

        All ranks may call this, after :meth:`drain`; the rank that commits does it.
        """
        if self._rank != self._strategy.saved.writers[0] or step in self._failed or self._writer.pending() is not None:
            return
        try:
            self._writer.amend(step, metadata)
        except (FencedError, CheckpointError, OSError, ValueError) as e:
            self._warner.warn(f"the checkpoint of step {step} does not know of the last evaluation: {e}", topic="amend")

    def drain(self) -> None:
        """Wait for the write that is under way, for as long as bytes are being written, and report how it ended."""
        stalled = self._writer.drain(self._limit_s, on_progress=self._outbox.progress)
        if stalled is not None and stalled.step != self._given_up:
            self._given_up = stalled.step
            reason = nothing_written(self._timeout_s)
            if (problem := self._writer.upload_problem()) is not None:
                reason = not_uploaded(self._timeout_s, problem, self._place_of_staged(stalled.step))
            self._outbox.put_event(CheckpointFailed(step=stalled.step, reason=reason))
        self.report()

    def _place_of_staged(self, step: int) -> str:
        """Return where a checkpoint is that could not be uploaded."""
        path = path_of(self._run_dir.checkpoints, step)
        if self._writers is None:
            return f"{path} on {socket.gethostname()}"
        return f"{path.parent}/.{path.name}.* on the nodes of its writers"

    @property
    def _limit_s(self) -> float:
        """The timeout of a stalled write in seconds; 0 after the first one."""
        return self._timeout_s if self._given_up is None else 0.0

    def finish(self, *, timeout_s: float) -> PendingCheckpoint | None:
        """End the background thread after its last write, and report what it has written.

        Returns:
            What is still being written after ``timeout_s``; None if nothing is, or if :meth:`drain` gave that up.
        """
        pending = self._writer.close(timeout_s=timeout_s)
        self.report()
        if pending is None or pending.step == self._given_up:
            return None
        return PendingCheckpoint(step=pending.step, progress=pending.progress)


def nothing_written(seconds: float) -> str:
    """Return why a checkpoint was given up."""
    return (
        f"nothing was written for {seconds:g} s: is the file system of the run directory full, slow or disconnected? "
        f"{_LIMIT}"
    )


def not_uploaded(seconds: float, problem: str, staged: str) -> str:
    """Return why the upload of a checkpoint was given up, and where it is: ``staged``."""
    return f"nothing was uploaded for {seconds:g} s ({problem}); it is in {staged}; {_LIMIT}"


def lost_timeout_s(config: Config) -> float:
    """Return how long a part that a rank of an ended generation writes may make no progress, in seconds.

    The rank may be lost. The last checkpoint of the run waits for this one, for ``recovery.hang_max_s`` at most.
    """
    return min(config.cluster.heartbeat_timeout_s, config.recovery.hang_max_s / 2)
