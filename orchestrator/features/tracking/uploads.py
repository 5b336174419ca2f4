"""What the core finds at the door of tracking. The verbs that only look for pending uploads import little with it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from orchestrator.config.operation import TrackingConfig
from orchestrator.features.tracking.pending_uploads import note_pending, pending_runs
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import RunDir

if TYPE_CHECKING:
    from orchestrator.features.tracking.uploader import RunUploader


def start(
    run_dir: RunDir, tracking: TrackingConfig, secrets: Sequence[str] = (), *, shared: bool = False
) -> RunUploader:
    """See :meth:`Tracking.start`."""
    from orchestrator.features.tracking.uploader import RunUploader  # its import takes a quarter of a second

    return RunUploader.start(run_dir, tracking, secrets, shared=shared)


def resume(output_dir: OutputDir, *, resumed: Collection[RunDir] = (), killed: Collection[RunDir] = ()) -> None:
    """See :meth:`Tracking.resume`."""
    for run_dir in killed:
        with contextlib.suppress(OSError, ValueError, KeyError):  # an unreadable run is left alone
            if run_dir.read_record()["tracking"]["uri"] is not None:
                note_pending(run_dir)
    if pending_runs(output_dir):
        from orchestrator.features.tracking.uploader import resume_uploads

        resume_uploads(output_dir, resumed=resumed)


def report_sweep(run_dir: RunDir, tracking: TrackingConfig, secrets: Sequence[str] = ()) -> None:
    """See :meth:`Tracking.report_sweep`."""
    from orchestrator.features.tracking import uploader

    uploader.report_sweep(run_dir, tracking, secrets)
