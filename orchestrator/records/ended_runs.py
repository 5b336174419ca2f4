"""How runs ended, also those whose driver could not say so."""

from __future__ import annotations

import contextlib

from orchestrator.protocol.events import RunEnded
from orchestrator.records import journal
from orchestrator.records.lock import locked_if_free
from orchestrator.records.run_dir import ACTIVE_STATES, RunDir


def exclusive(
    run_dir: RunDir, *, timeout_s: float = 0.0, target: str = "tracking"
) -> contextlib.AbstractContextManager[bool]:
    """Hold the upload lock of a run during the block; yields False if another process still has it at the timeout.

    ``target``: what is uploaded to: the ``tracking`` server or the ``sinks``.

    Two uploads at once, as on a file system without locks, also store each point once.
    """
    return locked_if_free(run_dir.path / f"{target}.lock", timeout_s=timeout_s)


def mark_killed(run_dir: RunDir, *, reason: str) -> None:
    """Record the end of a run whose driver has died; a run with a live driver is left alone.

    An end that is in the journal only, because the process that recorded it was killed, is the end of the run. Disk
    errors are ignored.
    """
    with contextlib.suppress(OSError), run_dir.edit_record() as record:
        if record.get("state") in ACTIVE_STATES and not run_dir.driver_if_running():
            run_dir.release_space()
            ending, _ = journal.read_ending(run_dir)
            if ending is not None and ending.time >= (record.get("started") or 0.0):
                record["state"] = ending.status.lower()
            else:
                journal.append_event(run_dir, RunEnded(status="KILLED", exit_code=137, reason=reason, summary={}))
                record.update(state="killed", reason=reason)


def final_ending(run_dir: RunDir) -> journal.Ending | None:
    """Return how the run ended, from its events or, if a full disk kept them from being written, from ``run.json``."""
    ending, _ = journal.read_ending(run_dir)
    record = run_dir.read_record()
    state = record.get("state", "waiting")
    if ending is None and state not in ACTIVE_STATES:
        last = run_dir.metrics_file if run_dir.metrics_file.exists() else run_dir.record_file
        at = last.stat().st_mtime
        return journal.Ending(status=state.upper(), time=at, summary=record.get("summary") or {})
    return ending
