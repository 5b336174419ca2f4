"""The driver's side of tracking: start the follower, wait for it at the end, upload what earlier commands have left.

This module neither imports MLflow nor waits for a server; ``follower.py`` does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orchestrator
from orchestrator.config.operation import TrackingConfig
from orchestrator.driver.process.uploads import Upload
from orchestrator.features.tracking import transfer
from orchestrator.features.tracking.follower import FollowerOptions
from orchestrator.features.tracking.pending_uploads import note_pending, pending_runs
from orchestrator.features.tracking.sinks import record_problems, sink_problem
from orchestrator.features.tracking.uri import is_redacted
from orchestrator.records.ended_runs import exclusive, final_ending
from orchestrator.records.lock import this_process
from orchestrator.records.output_dir import OutputDir, is_present
from orchestrator.records.run_dir import ACTIVE_STATES, RunDir

_REAP_TIMEOUT_S = 10.0
_MAX_RESTARTS = 3
"""How often a follower that died is started again within :data:`RESTARTS_COUNT_S`."""
RESTARTS_COUNT_S = 3600.0
_RECORDED = ("uri", "request_timeout_s", "flush_timeout_s", "background_timeout_s", "log_model", "log_dataset")
"""What the record of a run has of the options."""


class RunUploader:
    """A handle on the follower of one run.

    With ``tracking.uri=null`` and without sinks there is no follower, and calls do nothing.
    """

    def __init__(self, run_dir: RunDir, options: FollowerOptions | None):
        self._run_dir = run_dir
        self._options = options
        self._process = None if options is None else _spawn({run_dir: options})
        self._restarted_at: deque[float] = deque(maxlen=_MAX_RESTARTS)

    @classmethod
    def start(
        cls, run_dir: RunDir, tracking: TrackingConfig, secrets: Sequence[str] = (), *, shared: bool = False
    ) -> RunUploader:
        """Start the follower. ``run.json`` must exist, and ``tracking.uri`` must be valid and absolute.

        Args:
            secrets: texts to mask in what is uploaded.
            shared: see :class:`FollowerOptions`.
        """
        if tracking.uri is None and not tracking.all_sinks:
            return cls(run_dir, None)
        if tracking.uri is not None:
            note_pending(run_dir)
        if tracking.all_sinks:
            record_problems(run_dir, {})  # an earlier command may have had other sinks
        offset = run_dir.events_file.stat().st_size if run_dir.events_file.exists() else 0
        options = _options(tracking, secrets, this_process())
        return cls(run_dir, replace(options, events_offset=offset, shared=shared, sinks=tracking.all_sinks))

    def problem(self) -> str | None:
        """Return why the last upload failed, None if it succeeded. Reads one small file.

        A follower that has died, for example because the machine ran out of memory, is started again.
        """
        if self._process is None:
            return None
        if self._has_ended(timeout_s=0.0):
            return self._restart()
        return transfer.read_cursor(self._run_dir).error

    def sink_problem(self) -> str | None:
        """Return which sinks have failed at the last attempt, and why; None if none has."""
        return None if self._options is None or not self._options.sinks else sink_problem(self._run_dir)

    def page(self) -> str | None:
        """Return the address of the page that compares the run with others; None as long as there is none."""
        return None if self._process is None else transfer.read_cursor(self._run_dir).page

    def run_id(self) -> str | None:
        """Return the id of the run on the server; None as long as there is none. Reads one small file."""
        return None if self._process is None else transfer.read_cursor(self._run_dir).run_id

    def finish(self, timeout_s: float) -> Upload:
        """Wait up to ``timeout_s`` until everything is uploaded; the follower then goes on by itself.

        The journal must contain the run's ``RunEnded``.
        """
        if self._process is None:
            return Upload()
        deadline = time.monotonic() + timeout_s
        self._close_stdin()
        while self._has_ended(max(0.0, deadline - time.monotonic())):
            upload = self._result(in_progress=False)
            has_died = not upload.complete and upload.error is None
            if not has_died or self._is_given_up():
                return upload
            self._restart()
            self._close_stdin()
        return self.leave()

    def leave(self) -> Upload:
        """Let the follower finish on its own; return the present state."""
        if self._process is None:
            return Upload()
        self._close_stdin()
        self._process.poll()
        return self._result(in_progress=True)

    def _restart(self) -> str:
        """Start another follower for the one that has died, and return what happened."""
        assert self._options is not None
        if self._is_given_up():
            remedy = f"upload with `{shlex.join(['orchestrator', 'sync', str(self._run_dir.path)])}`"
            return f"the upload process died {_MAX_RESTARTS + 1} times; {remedy}"
        self._restarted_at.append(time.monotonic())
        self._close_stdin()
        self._process = _spawn({self._run_dir: self._options})
        return "the upload process died; another one continues"

    def _is_given_up(self) -> bool:
        """Return whether the follower has been started again too often, of late."""
        restarted_at = self._restarted_at
        return len(restarted_at) == _MAX_RESTARTS and time.monotonic() - restarted_at[0] < RESTARTS_COUNT_S

    def _has_ended(self, timeout_s: float) -> bool:
        """Return whether the follower ends within ``timeout_s``; its stdout closes when it does."""
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        stdout = self._process.stdout.fileno()
        while select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not os.read(stdout, 4096):
                self._process.wait(timeout=_REAP_TIMEOUT_S)
                return True
        return False

    def _close_stdin(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # close() sends what a process that died has not read
            self._process.stdin.close()

    def _result(self, *, in_progress: bool) -> Upload:
        if self._options is None or self._options.uri is None:
            return Upload()
        cursor = transfer.read_cursor(self._run_dir)
        missing = transfer.count_points(self._run_dir, offset=cursor.offset)
        ending = final_ending(self._run_dir)
        closed = ending is not None and ending.time == cursor.closed_at
        return Upload(
            run_id=cursor.run_id,
            page=cursor.page,
            uploaded=cursor.points,
            missing=missing,
            complete=closed and missing == 0,
            in_progress=in_progress,
            error=cursor.error,
        )


def resume_uploads(output_dir: OutputDir, *, resumed: Collection[RunDir] = ()) -> None:
    """Upload in the background what a server lacks of the runs that have ended, one after another.

    Which ones: see :func:`uploads_to_resume`. Waits for no upload.
    """
    if uploads := uploads_to_resume(output_dir, resumed=resumed):
        _upload_in_background(uploads)


def uploads_to_resume(output_dir: OutputDir, *, resumed: Collection[RunDir] = ()) -> dict[RunDir, FollowerOptions]:
    """Return the runs that have ended and of which a server may lack something.

    A run that another process uploads is left alone. So are runs to be ``resumed``, and those that a driver on another
    host has continued on a store. Runs whose stored URI has a masked password need ``orchestrator sync``.
    """
    uploads = {}
    for run_dir in pending_runs(output_dir):
        if run_dir in resumed:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError):  # an unreadable run is left alone
            record = run_dir.read_record()
            tracking = record["tracking"]
            if record["state"] in ACTIVE_STATES or tracking["uri"] is None or is_redacted(tracking["uri"]):
                continue
            options = _recorded_options(tracking, record["driver"])
            if not is_present(run_dir):
                continue
            with exclusive(run_dir) as acquired:
                if acquired:
                    uploads[run_dir] = options
    return uploads


def report_sweep(run_dir: RunDir, tracking: TrackingConfig, secrets: Sequence[str] = ()) -> None:
    """Upload the report of the sweep whose last run is ``run_dir``, in the background. Does not wait for anything.

    ``secrets``: texts to mask in what is uploaded.

    Raises:
        ValueError: the record of the run is damaged.
    """
    if tracking.uri is not None:
        # The run's own follower uploads the model and the dataset.
        tracking = replace(tracking, log_model=False, log_dataset=False)
        if (driver := run_dir.read_record().get("driver")) is None:
            raise ValueError(f"{run_dir.record_file} is damaged: no driver")
        note_pending(run_dir)
        _upload_in_background({run_dir: _options(tracking, secrets, driver)})


def _upload_in_background(uploads: Mapping[RunDir, FollowerOptions]) -> None:
    """Upload runs that have ended, one after another. A thread closes stdin and reaps the process."""
    threading.Thread(target=_spawn(uploads).communicate, daemon=True).start()


def _options(tracking: TrackingConfig, secrets: Sequence[str], driver: Mapping[str, Any]) -> FollowerOptions:
    """Options for runs that this process drives."""
    import_paths = tuple(str(Path(path).resolve()) for path in sys.path)
    options = _recorded_options(vars(tracking), driver)
    return replace(options, upload_every_s=tracking.upload_every_s, secrets=tuple(secrets), import_paths=import_paths)


def _recorded_options(tracking: Mapping[str, Any], driver: Mapping[str, Any]) -> FollowerOptions:
    """Options for a run that has ended, from the settings in its record, of which an earlier one may lack some."""
    known = {name: tracking[name] for name in _RECORDED if name in tracking}
    return FollowerOptions(driver=driver, **{"background_timeout_s": tracking["flush_timeout_s"], **known})


def _spawn(uploads: Mapping[RunDir, FollowerOptions]) -> subprocess.Popen[bytes]:
    package = str(Path(orchestrator.__file__).parents[1])
    path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH")) if p)
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.features.tracking.follower", *(str(run_dir.path) for run_dir in uploads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        for options in uploads.values():
            process.stdin.write(json.dumps(asdict(options)).encode() + b"\n")
        process.stdin.flush()
    return process
