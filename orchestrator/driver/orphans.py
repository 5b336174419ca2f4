"""Runs whose driver died with its machine."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from orchestrator.driver.process.uploads import tracking
from orchestrator.records.ended_runs import exclusive, mark_killed
from orchestrator.records.output_dir import OutputDir, push_records
from orchestrator.records.run_dir import ACTIVE_STATES, RunDir


def recover_orphans(output_dir: OutputDir, *, resumed: Collection[RunDir] = ()) -> list[RunDir]:
    """Mark every run in ``output_dir`` whose driver died with its machine as killed, and return these runs.

    On a store, these are the runs of this machine.

    Runs that are to be ``resumed`` are left alone: their own upload begins at once, and must not wait for another one.

    Their status on the tracking server is corrected as :meth:`Tracking.resume` says. Does not wait for anything.
    """
    orphans = []
    for run_dir in output_dir.runs_from_here():
        if run_dir in resumed:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError):  # an unreadable run is left alone
            record = run_dir.read_record()
            if record.get("state") not in ACTIVE_STATES or run_dir.driver_if_running():
                continue
            with exclusive(run_dir) as acquired:
                if not acquired:
                    continue
                mark_killed(run_dir, reason="the driver process died with its machine")
                push_records(run_dir)
            orphans.append(run_dir)
    tracking().resume(output_dir, resumed=resumed, killed=orphans)
    return orphans
