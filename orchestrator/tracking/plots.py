"""The pictures of a run: drawn by a process of its own after the run has ended, then uploaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from orchestrator.records.journal import Ending
from orchestrator.records.run_dir import RunDir
from orchestrator.tracking.backend import TrackingBackend
from orchestrator.tracking.transfer import Transfer, exclusive, final_ending, read_cursor

DRAWING_TIMEOUT_S = 120.0


def lacks_plots(run_dir: RunDir, ending: Ending | None) -> bool:
    """Return whether the server lacks the pictures of a run that has ended with ``ending``."""
    return ending is not None and read_cursor(run_dir).plots_at != ending.time


def upload_plots(
    run_dir: RunDir,
    backend: TrackingBackend,
    ending: Ending,
    *,
    secrets: Sequence[str] = (),
    lock_timeout_s: float = 0.0,
) -> None:
    """Draw the pictures of a run and upload them, unless the run has been resumed meanwhile.

    Args:
        run_dir: the run, closed on the server.
        backend: the server.
        ending: how the run ended.
        secrets: texts to mask in what is uploaded.
        lock_timeout_s: the longest wait for another upload of the run.

    Raises:
        Exception: whatever the backend raised.
        subprocess.SubprocessError: the drawing failed, or took longer than ``DRAWING_TIMEOUT_S``.
    """
    subprocess.run(
        [sys.executable, "-m", "orchestrator.display.run_pictures", str(run_dir.path)],
        check=True,
        timeout=DRAWING_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if pictures := sorted(picture.name for picture in run_dir.plots.glob("*.png")):
        run_dir.update_record(plots=pictures)
    with exclusive(run_dir, timeout_s=lock_timeout_s) as acquired:
        if acquired and final_ending(run_dir) == ending:
            Transfer(run_dir, backend, secrets=secrets).push_plots(ending)
