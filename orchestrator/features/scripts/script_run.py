"""The script of one rank in one generation, from its start to its end."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from orchestrator.features.scripts import child_process
from orchestrator.features.scripts.event_files import MARK, EventFiles
from orchestrator.features.scripts.script_failure import STOP_CODES, script_failure, why_not_stopped
from orchestrator.features.scripts.stored_checkpoints import StoredCheckpoints, upload_until
from orchestrator.protocol.events import FirstStepDone, MetricsLogged, StepsKnown, Warned
from orchestrator.protocol.messages import Assignment, Failure, FlightRecord, Outcome, Stacks
from orchestrator.records.rank_log import log_tail
from orchestrator.records.run_dir import RunDir
from orchestrator.script_api import LARGEST_REPORT_BYTES
from orchestrator.strategies.external.job import Script
from orchestrator.worker.control.control import AbandonedError, Outbox, StepGate
from orchestrator.worker.process.node_facts import kernel_oom_kills
from orchestrator.worker.process.output import flight_record_of

WORK_CHECKS = 10
"""How often the CPU time of a script is read in ``recovery.hang_max_s``, which looks at all processes of the node."""
ABANDONED_GRACE_S = 1.0
"""How long a script may take to end after SIGTERM when another rank has failed."""
GRACE_SHARE = 0.8
"""The share of ``cluster.stop_grace_s`` that a script has; in the rest, its end has to reach the driver."""
LOOK_EVERY_S = 1.0
"""How often rank 0 looks for event files of TensorBoard, and for scalars in them."""
RECORD_S = 0.5
"""How long a script may take to tell what it has enqueued; its worker takes as long."""
STACKS_S = 1.0
"""How long a script may take to write its stacks, before it is ended. The driver waits 2 s for both."""
_CHUNK_BYTES = 1 << 16
_TAIL_LINES = 200
_INNERMOST = re.compile(r"^Current thread .*\n(.*)", re.MULTILINE)
"""The innermost frame of the main thread, among the stacks that Python's fault handler writes."""
_TORCHS_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""What torch puts before each line of a traceback once there is a process group."""
_WAITS_IN = ("/torch/distributed/", "/torch/autograd/")


class ScriptRun:
    """Runs the script of a rank: passes on its output and its reports, and ends it when the generation ends."""

    def __init__(self, assignment: Assignment, job: Script, *, gate: StepGate, outbox: Outbox):
        self._assignment = assignment
        self._job = job
        self._gate = gate
        self._outbox = outbox
        self._run_dir = RunDir(Path(assignment.run_dir), assignment.remote)
        self._reports = child_process.Reports()
        self._events = EventFiles()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._lines = child_process.Lines()
        self._selector = selectors.DefaultSelector()
        self._process: child_process.ScriptProcess | None = None
        self._record: Path | None = None
        self._uncaught: Path | None = None
        self._last_lines: list[str] = []
        self._is_silent = True
        self._unfinished: int | None = None
        self._ended_by_us = False
        self._is_done = False
        self._over = threading.Event()

    @property
    def step(self) -> int:
        """The last step that the script has reported; 0 if it has reported none."""
        return self._reports.step

    def run(self, startup: dict[str, float]) -> Outcome:
        """Run the script, and return how it ended.

        Args:
            startup: the duration of each part of the start, in seconds.

        Raises:
            AbandonedError: the driver has ended the generation.
            OSError: the script cannot be started.
        """
        generation = self._assignment.generation
        with contextlib.ExitStack() as at_end, child_process.ReportSocket() as reports:
            at_end.enter_context(self._stored_checkpoints())
            self._outbox.enter(0, "train")
            at_end.callback(self._selector.close)
            at_end.callback(self._over.set)
            if self._job.kind != "program":
                self._record, self._uncaught = reports.record, reports.uncaught
            environment = child_process.script_environment(
                os.environ,
                self._assignment,
                packages=child_process.installed_packages(sys.path),
                reports=reports.path,
                errors=reports.errors,
                checkpoints=self._run_dir.script_checkpoints,
                record=self._record,
            )
            oom_kills = kernel_oom_kills()
            process = self._process = child_process.ScriptProcess(self._job.command(sys.executable), environment)
            at_end.callback(lambda: process.close(done=self._is_done))
            self._wake_at_changes(process, at_end)
            self._selector.register(process.output, selectors.EVENT_READ, self._read_output)
            accept = functools.partial(self._accept, reports.listener)
            self._selector.register(reports.listener, selectors.EVENT_READ, accept)
            self._outbox.put_event(FirstStepDone(generation=generation, startup=startup))
            try:
                stopped = self._follow(process, reports)
            except AbandonedError:
                self._end(process, ABANDONED_GRACE_S)
                raise
            if stopped:
                grace_s = GRACE_SHARE * self._assignment.config.cluster.stop_grace_s
                self._end(process, grace_s)
            ended_at = time.time()
            self._drain()
            at_end.callback(self._show_last_lines)
            self._take_scalars(reports.event_files() if self._assignment.global_rank == 0 else ())
            exit_code = process.exit_code()
            if exit_code is None:
                return self._unsaved(f"the script had not ended {grace_s:g} s after SIGTERM (cluster.stop_grace_s)")
            if stopped and exit_code in STOP_CODES:
                return Outcome(status="stopped", step=self.step)
            if exit_code == 0:
                self._is_done = True
                return Outcome(status="done", step=self.step)
            failure = script_failure(
                exit_code,
                "\n".join(self._tail),
                error_file=_text(reports.errors),
                log_tail=log_tail(self._run_dir.log_file(self._assignment.global_rank)),
                time=ended_at,
                after_end=self._ended_by_us and not stopped,
                uncaught=None if self._uncaught is None else _text(self._uncaught),
                oom_kill=kernel_oom_kills() != oom_kills,
            )
            self._show_last_lines(besides=failure.traceback)
            if stopped:
                return self._unsaved(why_not_stopped(failure), failure)
            return Outcome(status="failed", step=self.step, failure=failure)

    def _unsaved(self, why: str | None, failure: Failure | None = None) -> Outcome:
        """Return the outcome of a script that was to save and to end; ``why`` it has not done so, None if it has."""
        if why is not None:
            failure = failure or Failure(message=why, traceback="", time=time.time(), collateral=False, log_tail="")
        return Outcome(status="stopped", step=self.step, failure=None if why is None else failure)

    @contextlib.contextmanager
    def _stored_checkpoints(self) -> Iterator[None]:
        """If the run is on a store, bring the checkpoints of the script from there, and upload them until its end.

        Raises:
            StorageError: the store cannot be used; afterwards, this is only a warning.
        """
        if self._run_dir.remote is None:
            yield
            return
        config = self._assignment.config
        stored = StoredCheckpoints(self._run_dir, timeout_s=config.recovery.build_max_s)
        self._outbox.enter(0, "build")
        stored.fetch(self._outbox.progress)
        ended = threading.Event()
        every_s = config.storage.upload_every_s
        threading.Thread(target=upload_until, args=(ended, stored, every_s), name="upload", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            try:
                stored.upload()
            except OSError as e:
                where = self._run_dir.script_checkpoints
                self._outbox.put_event(Warned(message=f"the script's checkpoints in {where} are not uploaded: {e}"))

    def stacks(self) -> Stacks:
        """End the script, which reports its enqueued operations, and then writes the stacks of its Python threads.

        ``PYTHONFAULTHANDLER`` lets it write its stacks at SIGABRT. Of a program of another kind, nothing is known.
        """
        began = time.monotonic()
        flight = self._flight_record()
        time.sleep(max(0.0, began + RECORD_S - time.monotonic()))  # so that no rank ends before the others have told
        if self._process is not None:
            self._ended_by_us = True
            self._process.abort()
            if not self._over.wait(STACKS_S):
                self._process.send(signal.SIGKILL)
        text = "\n".join(self._tail)
        innermost = _INNERMOST.search(text)
        waiting = innermost is not None and any(part in innermost[1] for part in _WAITS_IN)
        return Stacks(text=text, waiting=waiting, flight=flight)

    def _flight_record(self) -> FlightRecord | None:
        """Return what the script has enqueued; None if it does not answer, or its record cannot be read."""
        if self._record is None or (record := child_process.ask(self._record, timeout_s=RECORD_S)) is None:
            return None
        return flight_record_of(lambda: record, since_ns=0, world_size=len(self._assignment.places))

    def _wake_at_changes(self, process: child_process.ScriptProcess, at_end: contextlib.ExitStack) -> None:
        """Let :meth:`_serve` return when the script ends, or when the driver ends the generation or lets it stop."""
        woken, waker = (at_end.enter_context(end) for end in socket.socketpair())
        waker.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ, functools.partial(woken.recv, _CHUNK_BYTES))

        def wake() -> None:
            with contextlib.suppress(OSError):  # it is awake, or at its end
                waker.send(b".")

        def wait() -> None:
            process.wait()
            wake()

        self._gate.on_change = wake
        threading.Thread(target=wait, name="end of script", daemon=True).start()

    def _follow(self, process: child_process.ScriptProcess, reports: child_process.ReportSocket) -> bool:
        """Follow the script to its end. Return True if the driver wants it to stop before.

        Raises:
            AbandonedError: the driver has ended the generation.
        """
        generation, checked_at = self._assignment.generation, time.monotonic()
        check_every_s = self._assignment.config.recovery.hang_max_s / WORK_CHECKS
        look_at = checked_at if self._assignment.global_rank == 0 else math.inf
        while process.exit_code() is None:
            self._gate.check(generation)
            if self._gate.is_stopping(generation):
                return True
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + LOOK_EVERY_S
                self._take_scalars([*process.open_files(MARK), *reports.event_files()])
            self._serve(max(0.0, min(look_at, checked_at + check_every_s) - time.monotonic()))
            if (passed_s := time.monotonic() - checked_at) >= check_every_s:
                checked_at += passed_s
                if process.has_worked(passed_s) and not self._waits():
                    self._outbox.progress()
        return False

    def _waits(self) -> bool:
        """Return whether a script that is silent has waited for other ranks since the last call.

        A rank that waits for NCCL uses its CPU. What it has enqueued last is not complete then, and is not new.
        """
        flight = self._flight_record() if self._is_silent else None
        before, self._unfinished = self._unfinished, None if flight is None else flight.enqueued.unfinished
        self._is_silent = True
        return self._unfinished is not None and self._unfinished == before

    def _end(self, process: child_process.ScriptProcess, grace_s: float) -> None:
        """Send SIGTERM to the script, and wait ``grace_s`` for its end; :meth:`ScriptProcess.close` kills it then."""
        self._ended_by_us = True
        process.send(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while process.exit_code() is None and (left_s := deadline - time.monotonic()) > 0:
            self._serve(left_s)
        self._drain()

    def _serve(self, timeout_s: float) -> bool:
        """Take what the script has sent, or wait for it. Return whether there was anything."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            take: Callable[[], None] = key.data
            take()
        return bool(ready)

    def _drain(self) -> None:
        """Take the last output and reports, unless a process that outlives the script goes on sending."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and self._serve(0.0):
            pass
        if self._lines.rest:
            self._print(self._lines.rest)

    def _take_scalars(self, found: Iterable[Path] = ()) -> None:
        """Log the new contents of the script's event files, with those ``found``."""
        for step, at, scalars in self._events.read(found):
            self._reports.note_step(step)
            self._outbox.enter(self.step, "train")
            self._outbox.put_event(MetricsLogged(step=step, time=at, metrics=scalars))
            self._progress()

    def _read_output(self) -> None:
        assert self._process is not None
        chunk = os.read(self._process.output, _CHUNK_BYTES)
        if not chunk:
            self._selector.unregister(self._process.output)
            return
        self._progress()
        is_ending = self._uncaught is not None and self._uncaught.exists()
        for line in self._lines.add(chunk):
            self._print(line, is_ending=is_ending)

    def _progress(self) -> None:
        self._is_silent = False
        self._outbox.progress()

    def _print(self, line: bytes, *, is_ending: bool = False) -> None:
        """Print a line to the log, and let the console show it; at the end of a script that has raised, later."""
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        print(text)
        text = _TORCHS_PREFIX.sub("", text)
        self._tail.append(text)
        if is_ending or self._last_lines:
            self._last_lines.append(text)
        else:
            self._outbox.put_lines([text])

    def _show_last_lines(self, *, besides: str = "") -> None:
        """Let the console show the retained lines, without those of a traceback that it shows itself."""
        known = set(besides.splitlines())
        self._outbox.put_lines([line for line in self._last_lines if line not in known])
        self._last_lines = []

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        lines = child_process.Lines(LARGEST_REPORT_BYTES)
        self._selector.register(
            connection, selectors.EVENT_READ, functools.partial(self._take_reports, connection, lines)
        )

    def _take_reports(self, connection: socket.socket, lines: child_process.Lines) -> None:
        chunk = connection.recv(_CHUNK_BYTES)
        if not chunk:
            self._selector.unregister(connection)
            connection.close()
        steps = self._reports.steps
        for line in lines.add(chunk):
            if (point := self._reports.point(line)) is not None:
                self._outbox.enter(self.step, "train")
                self._outbox.put_point(point)
                self._progress()
        if self._reports.steps != steps and self._assignment.global_rank == 0:
            self._outbox.put_event(StepsKnown(steps=self._reports.steps))


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.is_file() else ""
