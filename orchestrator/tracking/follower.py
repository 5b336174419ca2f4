"""The process that feeds MLflow beside a run: ``python -m orchestrator.tracking.follower <run directory>``.

It is no child of the driver, has its own session and runs only where the CPU would idle, so that neither Ctrl-C, nor
``ray job stop``, nor a slow server touches the training or the upload. It reads the journal about once a second, and
imports MLflow (seconds of CPU time) only when there is something to upload, so that it does not slow the start.

stdin: one JSON line (:class:`Hello`), then nothing; its end says that the driver finished or died.
stdout: its process id on one line; the stream ends with the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.records.journal import Ending, read_ending
from orchestrator.records.run_dir import RunDir, is_alive
from orchestrator.tracking.transfer import Transfer, exclusive, final_ending, mark_killed
from orchestrator.tracking.uri import sqlite_path

POLL_S = 1.0
MAX_PAUSE_S = 30.0
_MAX_PAUSE_AT_END_S = 2.0
_HELLO_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What the driver tells its follower, passwords included: this never stands on disk or in a process list.

    ``events_offset`` leaves out the ending of a run that is being resumed. ``driver`` is
    :func:`~orchestrator.records.run_dir.this_process`.
    """

    uri: str
    request_timeout_s: float
    flush_timeout_s: float
    events_offset: int
    driver: Mapping[str, Any]


def main() -> int:
    run_dir = RunDir(Path(sys.argv[1]).resolve())
    hello = _read_hello()
    if hello is None:
        return 1
    if os.fork():
        os._exit(0)  # the driver's child ends here; the follower below belongs to nobody
    _detach()
    # A predecessor may still be uploading what came before a resume.
    with exclusive(run_dir, timeout_s=hello.flush_timeout_s + MAX_PAUSE_S) as alone:
        if alone:
            _follow(run_dir, hello)
    return 0


def _read_hello() -> Hello | None:
    """None if the driver died before it had said anything."""
    ready, _, _ = select.select([sys.stdin], [], [], _HELLO_TIMEOUT_S)
    line = sys.stdin.readline() if ready else ""
    return Hello(**json.loads(line)) if line.endswith("\n") else None


def _detach() -> None:
    os.nice(19)
    _yield_cpu(True)
    print(os.getpid(), flush=True)
    # Kept open to show that this process lives; what libraries print must not fill the pipe.
    os.dup(sys.stdout.fileno())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


def _yield_cpu(idle: bool) -> None:
    """Run only on CPUs that would idle, or as any process of this niceness. Ray's workers are nice themselves."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE if idle else os.SCHED_OTHER, os.sched_param(0))


def _follow(run_dir: RunDir, hello: Hello) -> None:
    database = sqlite_path(hello.uri)
    os.chdir(database.parent if database and database.parent.is_dir() else run_dir.path)
    transfer = Transfer(run_dir, hello.uri, request_timeout_s=hello.request_timeout_s)
    driver = _Driver(hello.driver)
    ending: Ending | None = None
    offset, bounded = hello.events_offset, False
    pause = POLL_S
    while run_dir.path.is_dir():
        gone = not driver.alive()
        ending, offset = read_ending(run_dir, offset=offset, before=ending)
        if gone and ending is None:
            mark_killed(run_dir, reason="the driver process died without a word (kill -9?)")
            ending = final_ending(run_dir) or Ending(status="KILLED", time=time.time(), summary={})
        if ending and not bounded:
            bounded, pause = True, POLL_S
            _yield_cpu(False)
            _exit_after(hello.flush_timeout_s)
        try:
            if ending or _has_points(run_dir):
                transfer.push(ending)
        except Exception:  # MLflow, its database drivers and HTTP raise all kinds; the cursor has the text
            longest = _MAX_PAUSE_AT_END_S if ending else MAX_PAUSE_S
            pause = min(2 * pause, longest)
        else:
            pause = POLL_S
            if ending:
                break
        driver.wait(pause)
    if not driver.alive():
        with contextlib.suppress(OSError):
            run_dir.update_record(mlflow_run_id=transfer.cursor.run_id)


def _has_points(run_dir: RunDir) -> bool:
    return run_dir.metrics_file.exists() and run_dir.metrics_file.stat().st_size > 0


class _Driver:
    """Wakes this process when the driver closes the pipe; whether it died, its process id tells."""

    def __init__(self, process: Mapping[str, Any]):
        self._process = process
        self._open = True

    def alive(self) -> bool:
        return is_alive(self._process)

    def wait(self, seconds: float) -> None:
        """At most ``seconds``, less if the pipe closes meanwhile."""
        if not self._open:
            time.sleep(min(seconds, POLL_S))
        elif select.select([sys.stdin], [], [], seconds)[0]:
            self._open = bool(os.read(sys.stdin.fileno(), 4096))


def _exit_after(seconds: float) -> None:
    """Bound the end even where a library hangs in a call. The cursor on disk stays true."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
