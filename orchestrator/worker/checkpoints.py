"""Checkpoints of a run, as the training loop sees them: snapshot, write in the background, report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.protocol.events import CheckpointFailed, CheckpointSaved
from orchestrator.protocol.messages import Assignment
from orchestrator.records.run_dir import RunDir
from orchestrator.state.checkpoint_writer import CheckpointWriter, WriteFailed
from orchestrator.state.fence import Fence
from orchestrator.state.train_state import nonfinite_parameter
from orchestrator.strategies.base import Strategy
from orchestrator.worker.control import Outbox
from orchestrator.worker.metrics import NonFiniteError

STREAM = "stream"
"""The entry of a checkpoint's metadata that says where the training set can be read from, if that is a stream."""


class Checkpoints:
    """Takes snapshots of the training state and has them written on a background thread."""

    def __init__(self, assignment: Assignment, *, strategy: Strategy, outbox: Outbox):
        run_dir, config = RunDir(Path(assignment.run_dir)), assignment.config
        self._strategy = strategy
        self._outbox = outbox
        self._timeout_s = config.cluster.collective_timeout_s
        self._stall_ms = 0.0
        self._fence = Fence(run_dir.fence_file)
        self._fence.token = assignment.fence
        self._writer = CheckpointWriter(
            run_dir.checkpoints,
            keep=config.checkpoint.keep,
            run_uid=assignment.run_uid,
            fence=self._fence,
        )

    def reassign(self, assignment: Assignment) -> None:
        """Continue in the generation of ``assignment``."""
        self._fence.token = assignment.fence

    def save(self, *, step: int, samples_consumed: int, stream: Mapping[str, Any] | None = None) -> None:
        """Take a snapshot after ``step`` and submit it for writing. All ranks call this at the same step.

        Args:
            step: the last completed step.
            samples_consumed: global samples consumed up to that step.
            stream: where the training set can be read from, as JSON values; None if it has an index.

        Raises:
            NonFiniteError: a parameter is not finite; nothing is saved.
        """
        began = time.perf_counter()
        with self._strategy.quiesced():
            state = self._strategy.capture(step=step, samples_consumed=samples_consumed, into=self._writer.buffers())
        if state is not None:
            if stream is not None:
                state.meta[STREAM] = stream
            # A gradient can be NaN although the loss is finite, and the gradient norm is not always computed.
            if (name := nonfinite_parameter(state)) is not None:
                raise NonFiniteError(f"the parameter {name} is no longer finite", step)
            self._writer.submit(state, timeout_s=self._timeout_s)
            self._stall_ms = (time.perf_counter() - began) * 1e3

    def report(self) -> None:
        """Put an event into the outbox for each write that has ended since the last call."""
        for result in self._writer.results():
            if isinstance(result, WriteFailed):
                self._outbox.put_event(CheckpointFailed(step=result.step, reason=result.reason))
            else:
                self._outbox.put_event(
                    CheckpointSaved(
                        step=result.step,
                        path=str(result.path),
                        seconds=result.seconds,
                        stall_ms=self._stall_ms,
                        size_bytes=result.size_bytes,
                    )
                )

    def drain(self) -> None:
        """Wait for the writes that are under way, and report them."""
        self._writer.drain(timeout_s=self._timeout_s)
        self.report()

    def close(self, *, timeout_s: float) -> None:
        """End the background thread after its last write, and report what it has written."""
        self._writer.close(timeout_s=timeout_s)
        self.report()
