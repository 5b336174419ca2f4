"""The script of ``strategy=script`` with ``debug=true``: it runs in the main thread of the driver, as the only rank."""

from __future__ import annotations

import contextlib
import os
import runpy
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from orchestrator.features.scripts import child_process
from orchestrator.features.scripts.script_actor import ScriptWorker
from orchestrator.job import Job
from orchestrator.protocol.events import FirstStepDone, StepsKnown
from orchestrator.protocol.messages import Assignment, Outcome
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies.external.job import Script
from orchestrator.user_code.errors import JobError
from orchestrator.worker.debug_worker import InThisProcess

_CHUNK_BYTES = 1 << 16
_REPORTS_S = 2.0
"""How long the last reports may take, which come from another process if the script has left them to one."""


class DebugScriptWorker(InThisProcess, ScriptWorker):
    """Runs the script, whose reports a thread takes. Ctrl-C interrupts it, as under plain Python."""

    def __init__(self, **options: object):
        super().__init__(**options)  # type: ignore[arg-type]
        self._reports = child_process.Reports()
        self._has_all = threading.Event()

    def _run(self, assignment: Assignment, job: Job, startup: dict[str, float]) -> Outcome:
        assert isinstance(job, Script)
        if job.kind == "program":
            raise JobError("debug=true: job.kind=program is a process of its own; start it under its own debugger")
        run_dir = RunDir(Path(assignment.run_dir), assignment.remote)
        self.outbox.enter(0, "train")
        with child_process.ReportSocket() as reports:
            environment = child_process.script_environment(
                os.environ,
                assignment,
                reports=reports.path,
                errors=reports.errors,
                checkpoints=run_dir.script_checkpoints,
                record=None,
            )
            threading.Thread(target=self._take_reports, args=(reports.listener,), name="reports", daemon=True).start()
            self.outbox.put_event(FirstStepDone(generation=assignment.generation, startup=startup))
            with _started_as_program(job, environment):
                try:
                    code = self._exit_code(job)
                finally:
                    reports.end_reports()
                    self._has_all.wait(_REPORTS_S)
        if code not in (None, 0):
            raise JobError(f"the script ended with sys.exit({code!r})")
        return Outcome(status="done", step=self._reports.step)

    def _failed(self, error: BaseException, assignment: Assignment) -> Outcome:
        return replace(super()._failed(error, assignment), step=self._reports.step)

    def _exit_code(self, job: Script) -> object:
        """Run the script. Return what it has ended with; None if it has come to its end."""
        try:
            if job.kind == "module":
                runpy.run_module(job.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(Path(job.script).resolve()), run_name="__main__")
        except SystemExit as e:
            return e.code
        return None

    def _take_reports(self, listener: socket.socket) -> None:
        """Take the reports of the script until the socket is closed."""
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            lines = child_process.Lines()
            while chunk := connection.recv(_CHUNK_BYTES):
                steps = self._reports.steps
                for line in lines.add(chunk):
                    if not line:
                        self._has_all.set()
                    if (point := self._reports.point(line)) is not None:
                        self.outbox.enter(self._reports.step, "train")
                        self.outbox.put_point(point)
                if self._reports.steps != steps:
                    self.outbox.put_event(StepsKnown(steps=self._reports.steps))


@contextlib.contextmanager
def _started_as_program(job: Script, environment: Mapping[str, str]) -> Iterator[None]:
    """Give this process the arguments, the variables, the imports and the Ctrl-C that the script expects."""
    before = dict(os.environ), list(sys.argv), list(sys.path)
    is_main = threading.current_thread() is threading.main_thread()  # elsewhere, the program decides about Ctrl-C
    handler = signal.signal(signal.SIGINT, signal.default_int_handler) if is_main else None
    os.environ.update(environment)
    sys.argv[:] = [job.script, *shlex.split(job.args)]
    sys.path.insert(0, str(Path(job.script).resolve().parent) if job.kind == "file" else str(Path.cwd()))
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, handler)
        os.environ.clear()
        os.environ.update(before[0])
        sys.argv[:], sys.path[:] = before[1], before[2]
