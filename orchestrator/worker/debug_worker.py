"""The worker of ``debug=true``: it trains in the process of the driver, in its main thread, beside a terminal."""

from __future__ import annotations

import bdb
import contextlib
import os
import pdb
import socket
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TextIO, cast

import torch

from orchestrator.compat.ray import refused
from orchestrator.config.redact import RedactingStream
from orchestrator.protocol import messages
from orchestrator.records.rank_log import log_header, newest_part
from orchestrator.user_code.breakpoints import VARIABLE
from orchestrator.user_code.errors import own_frames
from orchestrator.user_code.own_errors import causes, own_error
from orchestrator.worker.actor import Worker
from orchestrator.worker.base_actor import BaseWorker, Notice
from orchestrator.worker.process import output
from orchestrator.worker.process.gpu import with_gpus
from orchestrator.worker.process.network import LOOPBACK
from orchestrator.worker.process.output import Output

NODE = "this process"
"""Stands for the id of a node, of which there is no other."""


class InThisProcess(BaseWorker):
    """The only rank of a run, whose methods the driver calls without Ray. Use as a context manager.

    Attributes:
        was_left: whether the user has left the debugger, so that the run has to end.
    """

    def __init__(self, *, heartbeat_timeout_s: float, variables: messages.Variables):
        super().__init__(
            "rank 0",
            heartbeat_timeout_s=heartbeat_timeout_s,
            variables=variables,
            requirements=(),
            install_timeout_s=0.0,
        )
        self.was_left = False

    def __enter__(self) -> Self:
        refused.quiet()
        return self

    def __exit__(self, *_: object) -> None:
        cast(CopiedOutput, self.output).close()

    def info(self, *, on_gpu: bool) -> messages.WorkerInfo:
        """Return where this process runs; ``on_gpu``: whether it trains on a GPU, if torch can compute on it."""
        info = messages.WorkerInfo(node_id=NODE, node_ip=LOOPBACK, hostname=socket.gethostname(), pid=os.getpid())
        return with_gpus(info, ["0"]) if on_gpu and torch.cuda.is_available() else info

    def _output(self) -> Output:
        return CopiedOutput(self)

    def _notice(self) -> Notice:
        return Notice()

    def _node(self) -> tuple[str, str]:
        return NODE, LOOPBACK

    def _name_process(self, title: str) -> None:
        pass

    def _failed(self, error: BaseException, assignment: messages.Assignment) -> messages.Outcome:
        if _has_left(error):
            self.was_left = True
            return messages.Outcome(status="stopped", step=0)
        outcome = super()._failed(error, assignment)  # type: ignore[safe-super] # the other base has it
        failure, own = outcome.failure, own_error(error)
        assert failure is not None
        if own is not None and not failure.own_frames and failure.traceback:  # of a script
            failure = replace(failure, message=f"{failure.message} ({own.place})", own_frames=own.frames)
        if _has_terminal():
            print(f"\n{failure.message}\npost mortem: p NAME prints, u and d move, q ends the run", flush=True)
            _PostMortem(error).begin()
        return replace(outcome, failure=failure)


class DebugWorker(InThisProcess, Worker):
    """The rank of a job."""


class CopiedOutput(Output):
    """Writes what Python code prints to the log too, with secrets masked, and leaves the terminal as it is."""

    def __init__(self, worker: BaseWorker):
        self._worker = worker
        self._before: tuple[TextIO, TextIO] | None = None
        self._log: TextIO | None = None

    def redirect(self, log: Path) -> None:
        self.close()
        log.parent.mkdir(parents=True, exist_ok=True)
        file = newest_part(log).open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
        file.write(log_header(os.getpid(), socket.gethostname()))
        self._log = cast(TextIO, RedactingStream(file, self._worker.redactor))
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (cast(TextIO, _Copying(stream, self._log)) for stream in self._before)
        output.use(self)

    @contextlib.contextmanager
    def log_only(self) -> Iterator[TextIO]:
        yield self._log or sys.stderr

    def close(self) -> None:
        """Write no further copies."""
        if self._before is not None and self._log is not None:
            sys.stdout, sys.stderr = self._before
            self._log.close()
            self._before = self._log = None
            output.use(None)


class _Copying:
    """A text stream that copies what is written to it; in all else it is ``stream``, also for ``input()``."""

    def __init__(self, stream: TextIO, copy: TextIO):
        self._stream = stream
        self._copy = copy

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # a full disk, or an output that is closed
            self._copy.write(text)
        return self._stream.write(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _PostMortem(pdb.Pdb):
    """A debugger at the innermost frame of the user's code, below which are those of libraries."""

    def __init__(self, error: BaseException):
        super().__init__()
        self._error = next((e for e in causes(error) if own_frames(e)), error)
        self.reset()

    def begin(self) -> None:
        """Wait for the user until they leave."""
        with contextlib.suppress(bdb.BdbQuit):
            self.interaction(None, self._error.__traceback__)

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        stack, index = super().get_stack(f, t)
        own = {entry.tb_frame for entry in own_frames(self._error)}
        return stack, next((i for i in reversed(range(len(stack))) if stack[i][0] in own), index)


def _has_left(error: BaseException) -> bool:
    """Return whether the user has ended the debugger, whichever error that has become."""
    left = (bdb.BdbQuit, KeyboardInterrupt)
    return any(isinstance(e, left) or (isinstance(e, SystemExit) and _is_of_pdb(e)) for e in causes(error))


def _is_of_pdb(error: SystemExit) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") == "pdb"


def _has_terminal() -> bool:
    """Return whether somebody can answer a debugger that the terminal shows."""
    debugpy = sys.modules.get("debugpy")  # another debugger, which shows errors itself
    is_attached = debugpy is not None and debugpy.is_client_connected()
    wanted = os.environ.get(VARIABLE) != "0" and not is_attached
    return wanted and sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
