"""The driver's side of MLflow: start the follower, wait for it at the end, mend what dead drivers left behind.

Nothing here imports MLflow or waits for a server; see ``follower.py`` for the process that does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orchestrator
from orchestrator.config.schema import TrackingConfig
from orchestrator.records.run_dir import RunDir, all_runs, this_process
from orchestrator.tracking.follower import Hello
from orchestrator.tracking.transfer import (
    count_points,
    exclusive,
    final_ending,
    mark_killed,
    read_cursor,
)
from orchestrator.tracking.uri import is_redacted

_KILL_TIMEOUT_S = 2.0
_MAX_DETACHED = 4
"""Orphans whose upload is started at once; `python -m orchestrator.sync` does the others."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What MLflow has of a run: ``missing`` counts values that it lacks.

    ``complete``: it has every value, the final status and the artifacts. ``error`` is why the last attempt failed.
    """

    run_id: str | None
    uploaded: int
    missing: int
    complete: bool
    error: str | None


_NOTHING_TO_UPLOAD = Upload(run_id=None, uploaded=0, missing=0, complete=True, error=None)


class Uploader:
    """The follower of one run. With ``tracking.uri=null`` there is none, and every call returns at once."""

    def __init__(self, run_dir: RunDir, process: subprocess.Popen[bytes] | None):
        self._run_dir = run_dir
        self._process = process
        self._pid: int | None = None

    @classmethod
    def start(cls, run_dir: RunDir, tracking: TrackingConfig) -> Uploader:
        """Start following; ``run.json`` must be there, and ``tracking.uri`` valid and absolute."""
        if tracking.uri is None:
            return cls(run_dir, None)
        hello = Hello(
            uri=tracking.uri,
            request_timeout_s=tracking.request_timeout_s,
            flush_timeout_s=tracking.flush_timeout_s,
            events_offset=_size(run_dir.events_file),
            driver=this_process(),
        )
        return cls(run_dir, _spawn(run_dir, hello))

    def problem(self) -> str | None:
        """Why nothing reaches the server at present; None if all is well. Reads one small file."""
        return read_cursor(self._run_dir).error if self._process else None

    def finish(self, timeout_s: float) -> Upload:
        """Wait until the rest is uploaded, ``timeout_s`` at most, then end the follower.

        The run's ``RunEnded`` must be in the journal.
        """
        if self._process is not None and not self._ended(timeout_s):
            self._kill()
        return self._result() if self._process is not None else _NOTHING_TO_UPLOAD

    def leave(self) -> Upload:
        """Let the follower finish by itself, within ``tracking.flush_timeout_s``; what MLflow has so far."""
        if self._process is None:
            return _NOTHING_TO_UPLOAD
        self._close_stdin()
        self._process.poll()
        return self._result()

    def _ended(self, timeout_s: float) -> bool:
        """Whether the follower ended in time: its stdout closes with it."""
        assert self._process is not None
        assert self._process.stdout is not None
        self._close_stdin()
        deadline = time.monotonic() + timeout_s
        stdout = self._process.stdout.fileno()
        while select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if text := os.read(stdout, 4096):
                self._pid = int(text)
            else:
                self._process.wait(timeout=10)
                return True
        return False

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()  # where it has not detached yet
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._ended(_KILL_TIMEOUT_S)

    def _close_stdin(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _result(self) -> Upload:
        cursor = read_cursor(self._run_dir)
        missing = count_points(self._run_dir, offset=cursor.offset)
        ending = final_ending(self._run_dir)
        closed = ending is not None and ending.time == cursor.closed_at
        return Upload(
            run_id=cursor.run_id,
            uploaded=cursor.points,
            missing=missing,
            complete=closed and missing == 0,
            error=cursor.error,
        )


def recover_orphans(output_dir: Path) -> list[RunDir]:
    """Mark as killed every run whose driver died with its machine, and return them.

    Their status on the server is mended by followers in the background, which end by themselves; where the stored
    URI has a masked password or no server answers, by ``python -m orchestrator.sync``. Does not wait for anything.
    """
    orphans = []
    for run_dir in all_runs(output_dir):
        with contextlib.suppress(OSError, ValueError, KeyError):  # not ours to judge: left alone
            record = run_dir.read_record()
            if record.get("state") != "running" or run_dir.driver_if_running():
                continue
            with exclusive(run_dir) as alone:
                if not alone:
                    continue
                mark_killed(run_dir, reason="the driver process died with its machine")
            orphans.append(run_dir)
            if len(orphans) <= _MAX_DETACHED:
                _mend_status(run_dir, record)
    return orphans


def _mend_status(run_dir: RunDir, record: Mapping[str, Any]) -> None:
    tracking = record["tracking"]
    if tracking["uri"] is None or is_redacted(tracking["uri"]):
        return
    hello = Hello(
        uri=tracking["uri"],
        request_timeout_s=tracking["request_timeout_s"],
        flush_timeout_s=tracking["flush_timeout_s"],
        events_offset=0,
        driver=record["driver"],
    )
    Uploader(run_dir, _spawn(run_dir, hello)).leave()


def _spawn(run_dir: RunDir, hello: Hello) -> subprocess.Popen[bytes]:
    package = str(Path(orchestrator.__file__).parents[1])
    path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH")) if p)
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.tracking.follower", str(run_dir.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(asdict(hello)).encode() + b"\n")
        process.stdin.flush()
    return process


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
