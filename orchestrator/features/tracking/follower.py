"""The process that uploads a run while it trains, called with the run directory.

It is not a child of the driver and has its own session. So Ctrl-C and ``ray job stop`` do not end the upload. A child
of it uploads, which runs only on CPUs that would idle, so that the training is not slowed. If others use all CPUs when
the run has ended, another child of normal priority takes over: an unprivileged process cannot raise its own priority.
The import of MLflow takes seconds of CPU time. The first upload therefore comes ``tracking.upload_every_s`` after the
first point, and the page of a shorter run after its end.

The driver waits ``tracking.flush_timeout_s`` for the rest of the upload, which then goes on without it. An upload that
fails after that time leaves the lock of the run to others, and is repeated until ``tracking.background_timeout_s``, by
one process for each output directory. What is left then, the next command uploads (``pending_uploads.py``).

Given several run directories, of runs that have ended, it uploads one after another, each in a child process. None is
repeated, because it would hold up the others.

stdin: a JSON line (:class:`FollowerOptions`) for each run directory, then nothing; its end means that the driver
finished or died.
stdout: nothing; the stream ends when everything is uploaded and the sinks are closed, or with the process. The final
model, which takes seconds to export, follows after that.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from orchestrator.features.tracking.exports import EXPORT_TIMEOUT_S, missing_exports, upload_exports
from orchestrator.features.tracking.mlflow import MlflowBackend
from orchestrator.features.tracking.pending_uploads import alone_in_retrying
from orchestrator.features.tracking.sinks import Sinks, record_problems
from orchestrator.features.tracking.transfer import Transfer, read_cursor
from orchestrator.features.tracking.uri import sqlite_path
from orchestrator.records.ended_runs import exclusive, final_ending, mark_killed
from orchestrator.records.journal import Ending, read_ending
from orchestrator.records.lock import end_with_parent, is_alive
from orchestrator.records.run_dir import RunDir

POLL_S = 1.0
MAX_PAUSE_S = 30.0
_MAX_PAUSE_AT_END_S = 2.0
_OPTIONS_TIMEOUT_S = 10.0
_EXPORT_UPLOAD_TIMEOUT_S = 600.0
_STARVED_S, _STARVED_SHARE = 3.0, 0.3
"""After the run, a child that wants to run and gets less than this share of a CPU for so long need not yield."""


@dataclass(frozen=True, kw_only=True)
class FollowerOptions:
    """Options that the driver sends through a pipe, because ``secrets``, and passwords in ``uri``, must not appear on
    disk or in a process list.

    Attributes:
        uri: the server; None if there are only sinks.
        events_offset: skips the ending that a resumed run already has in its journal.
        driver: the result of :func:`~orchestrator.records.lock.this_process` there.
        shared: a script logs to the same run on the server, which is therefore made at once and never replaced.
        log_model: upload the model of a run that finishes.
        import_paths: where its job and the sinks are found.
        sinks: the import paths of what else receives the run.
    """

    uri: str | None
    request_timeout_s: float
    flush_timeout_s: float
    background_timeout_s: float
    driver: Mapping[str, Any]
    upload_every_s: float = 0.0
    events_offset: int = 0
    secrets: Sequence[str] = ()
    shared: bool = False
    log_model: bool = False
    log_dataset: bool = False
    import_paths: Sequence[str] = ()
    sinks: Sequence[str] = ()

    @property
    def longest_s(self) -> float:
        """The longest time that an upload may take after the end of the run."""
        return self.flush_timeout_s + self.background_timeout_s


def main() -> int:
    """Detach from the driver, upload until the run has ended, and return the exit code."""
    run_dirs = [RunDir(Path(path).resolve()) for path in sys.argv[1:]]
    all_options = _read_options(len(run_dirs))
    if len(all_options) < len(run_dirs):
        return 1
    if os.fork():
        os._exit(0)  # the driver's child ends here; the follower is the orphaned grandchild
    driver_pipe = _detach()
    uploads = list(zip(run_dirs, all_options, strict=True))
    if len(uploads) == 1:
        return _supervise(*uploads[0], driver_pipe, repeats=True)
    for upload in uploads:
        if (child := os.fork()) == 0:
            return _supervise(*upload, driver_pipe, repeats=False)
        os.waitpid(child, 0)
    return 0


def _supervise(run_dir: RunDir, options: FollowerOptions, driver_pipe: int, *, repeats: bool) -> int:
    """Upload a run in a child process, or in a second one if the first gets no CPU after the run.

    The driver, which need not wait for the model, sees the end of the upload as the end of ``driver_pipe``,
    which both processes close. ``repeats``: an upload that fails is repeated in the background.

    A further child feeds the sinks, whose code may hang or crash.

    Returns:
        The exit code of the last child.
    """
    feeder = os.fork() if options.sinks else None
    if feeder == 0:
        end_with_parent(signal.SIGKILL)
        _feed_sinks(run_dir, options)
        return 0
    if options.uri is None:
        assert feeder is not None
        return _wait_for_feeder(feeder, run_dir)
    for yields_cpu in (True, False):
        uploaded, child_pipe = os.pipe()
        if (child := os.fork()) == 0:
            end_with_parent(signal.SIGKILL)
            if yields_cpu and not options.shared:
                _yield_cpu()
            is_uploaded = _upload(run_dir, options, repeats=repeats)
            os.close(driver_pipe)
            os.write(child_pipe, b".")  # otherwise it has died
            os.close(child_pipe)
            if is_uploaded:
                _upload_exports(run_dir, options)
            return 0 if is_uploaded else 1
        os.close(child_pipe)
        if not (yields_cpu and _starves(psutil.Process(child), uploaded)):
            break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    has_died = not os.read(uploaded, 1)
    if feeder is not None:
        if has_died:  # the driver starts another follower
            os.kill(feeder, signal.SIGKILL)
        _wait_for_feeder(feeder, run_dir)
    os.close(driver_pipe)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _wait_for_feeder(feeder: int, run_dir: RunDir) -> int:
    """Wait for the child that feeds the sinks, and record if it has died; returns its exit code."""
    exit_code = os.waitstatus_to_exitcode(os.waitpid(feeder, 0)[1])
    if exit_code:
        record_problems(run_dir, {"sinks": f"their process has died (exit code {exit_code})"})
    return exit_code


def _starves(child: psutil.Process, uploaded: int) -> bool:
    """Wait until ``child`` has uploaded a run, or gets too little CPU after the run; return whether it does.

    ``uploaded`` is a pipe, whose end is the end of the upload.
    """
    run_ended = sys.stdin in select.select([uploaded, sys.stdin], [], [])[0]
    while run_ended:
        used_s = sum(child.cpu_times()[:2])
        if select.select([uploaded], [], [], _STARVED_S)[0]:
            break
        used_s = sum(child.cpu_times()[:2]) - used_s
        if child.status() == psutil.STATUS_RUNNING and used_s < _STARVED_SHARE * _STARVED_S:
            return True
    return False


def _read_options(count: int) -> list[FollowerOptions]:
    """Read ``count`` lines of options; fewer if the driver died before it sent them."""
    ready, _, _ = select.select([sys.stdin], [], [], _OPTIONS_TIMEOUT_S)
    lines = [sys.stdin.readline() for _ in range(count)] if ready else []
    return [FollowerOptions(**json.loads(line)) for line in lines if line.endswith("\n")]


def _detach() -> int:
    """Let go of the driver's pipes; returns a descriptor whose closing tells the driver to go on."""
    # The duplicate keeps the pipe open as long as this process lives; output of libraries must not fill the pipe.
    driver_pipe = os.dup(sys.stdout.fileno())
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    return driver_pipe


def _yield_cpu() -> None:
    """Run only on CPUs that would idle. Niceness alone is not enough: Ray's workers are nice themselves."""
    os.nice(19)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _feed_sinks(run_dir: RunDir, options: FollowerOptions) -> None:
    """Give a run to its sinks until it has ended."""
    _yield_cpu()
    sys.path += [path for path in options.import_paths if path not in sys.path]
    with exclusive(run_dir, timeout_s=options.flush_timeout_s, target="sinks") as acquired:
        if acquired:
            _follow(run_dir, options, Sinks(run_dir, options.sinks, secrets=options.secrets))


def _upload(run_dir: RunDir, options: FollowerOptions, *, repeats: bool) -> bool:
    """Upload a run until it has ended, and return whether the server has everything."""
    assert options.uri is not None
    database = sqlite_path(options.uri)
    os.chdir(database.parent if database and database.parent.is_dir() else run_dir.path)
    backend = MlflowBackend(options.uri, request_timeout_s=options.request_timeout_s)
    # The follower of an interrupted launch may still be uploading what precedes the resume.
    with exclusive(run_dir, timeout_s=options.longest_s if repeats else options.flush_timeout_s) as acquired:
        if not acquired:
            return False
        transfer = Transfer(run_dir, backend, secrets=options.secrets, replaces_run=not options.shared)
        if options.shared:
            with contextlib.suppress(Exception):  # as in _follow, which tries again
                transfer.push(None)
            _yield_cpu()
        missing = _follow(run_dir, options, transfer)
    if missing is not None and not (repeats and _repeat(run_dir, options, transfer, missing)):
        return False
    _record_upload(run_dir)
    return True


def _follow(run_dir: RunDir, options: FollowerOptions, transfer: Transfer | Sinks) -> Ending | None:
    """Upload a run until it has ended.

    Returns:
        The end of the run if the server has not accepted everything within ``tracking.flush_timeout_s``; otherwise
        None, also for a run that has been deleted, or resumed, and has another follower then.
    """
    driver = _Driver(options.driver)
    ending: Ending | None = None
    offset = options.events_offset
    pause, due = POLL_S, math.inf
    flushed_by: float | None = None
    with contextlib.ExitStack() as on_return:
        while run_dir.path.is_dir():
            driver_died = not driver.alive()
            if driver_died and _has_other_driver(run_dir, options.driver):
                return None
            ending, offset = read_ending(run_dir, offset=offset, before=ending)
            if flushed_by is None:
                if driver_died:
                    mark_killed(run_dir, reason="the driver process died without reporting an end (kill -9?)")
                    ending = ending or final_ending(run_dir) or Ending(status="KILLED", time=time.time(), summary={})
                if ending:
                    pause, flushed_by = POLL_S, time.monotonic() + options.flush_timeout_s
                    on_return.callback(_exit_after(options.longest_s).cancel)
            elif ending is None:
                return None
            points = run_dir.metrics_file
            if due == math.inf and points.exists() and points.stat().st_size > 0:
                due = time.monotonic() + options.upload_every_s
            if ending or time.monotonic() >= due:
                try:
                    transfer.push(ending)
                except Exception:  # of any type: MLflow, database drivers, HTTP; the cursor has the text
                    if flushed_by is not None and time.monotonic() >= flushed_by:
                        return ending
                    pause = min(2 * pause, _MAX_PAUSE_AT_END_S if ending else MAX_PAUSE_S)
                    due = time.monotonic() + pause
                else:
                    if ending:
                        return None
                    pause, due = POLL_S, time.monotonic() + options.upload_every_s
            driver.wait(pause if ending else POLL_S)
    return None


def _repeat(run_dir: RunDir, options: FollowerOptions, transfer: Transfer, ending: Ending) -> bool:
    """Repeat the upload of a run that has ended, if no other process does that; return whether it succeeded.

    Between the attempts, ``orchestrator sync`` or the next driver of the run may upload.
    """
    deadline = _exit_after(options.longest_s)
    pause = POLL_S
    with alone_in_retrying(run_dir) as alone:
        while alone:
            pause = min(2 * pause, MAX_PAUSE_S)
            time.sleep(pause)
            with contextlib.suppress(Exception), exclusive(run_dir) as acquired:  # as in _follow
                if not acquired:
                    continue
                if final_ending(run_dir) == ending and read_cursor(run_dir).closed_at != ending.time:
                    transfer.push(ending)
                break
    deadline.cancel()
    return alone


def _upload_exports(run_dir: RunDir, options: FollowerOptions) -> None:
    """Upload the model and the dataset of a run that has finished.

    At the lowest priority, because the next run of a sweep may train already. What fails, ``orchestrator sync``
    uploads.
    """
    ending = final_ending(run_dir)
    if ending is None or options.uri is None:
        return
    exports = missing_exports(run_dir, ending, log_model=options.log_model, log_dataset=options.log_dataset)
    if not exports:
        return
    _yield_cpu()
    deadline = _exit_after(EXPORT_TIMEOUT_S + _EXPORT_UPLOAD_TIMEOUT_S)
    with contextlib.suppress(Exception):  # of any type: the job's code, MLflow, database drivers, HTTP
        upload_exports(
            exports,
            run_dir,
            MlflowBackend(options.uri, request_timeout_s=options.request_timeout_s),
            ending,
            import_paths=options.import_paths,
            secrets=options.secrets,
            lock_timeout_s=options.flush_timeout_s,
        )
    deadline.cancel()


def _has_other_driver(run_dir: RunDir, driver: Mapping[str, Any]) -> bool:
    """Whether another process than ``driver`` has taken the run over."""
    try:
        record = run_dir.read_driver()
    except ValueError:
        return False
    return any(record.get(key) != driver[key] for key in ("pid", "start_ticks"))


def _record_upload(run_dir: RunDir) -> None:
    """Enter the id on the server into the record of a run that has ended: its driver may no longer do that."""
    cursor, ending = read_cursor(run_dir), final_ending(run_dir)
    if ending is not None and cursor.closed_at == ending.time:
        with contextlib.suppress(OSError, ValueError):
            run_dir.record_upload(cursor.run_id)


class _Driver:
    """The driver process: :meth:`alive` checks its id, and the end of its pipe ends :meth:`wait`."""

    def __init__(self, process: Mapping[str, Any]):
        self._process = process
        self._open = True

    def alive(self) -> bool:
        return is_alive(self._process)

    def wait(self, seconds: float) -> None:
        """Wait ``seconds``, or less if the pipe closes meanwhile."""
        if not self._open:
            time.sleep(min(seconds, POLL_S))
        elif select.select([sys.stdin], [], [], seconds)[0]:
            self._open = bool(os.read(sys.stdin.fileno(), 4096))


def _exit_after(seconds: float) -> threading.Timer:
    """End this process after ``seconds`` even if a library hangs in a call. The cursor on disk stays correct."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()
    return timer


if __name__ == "__main__":
    sys.exit(main())
