"""The final model of a run: exported by a process of its own after the run has ended, then uploaded."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from orchestrator.records.journal import Ending
from orchestrator.records.run_dir import RunDir
from orchestrator.tracking.backend import TrackingBackend
from orchestrator.tracking.transfer import Transfer, exclusive, final_ending, read_cursor

EXPORT_TIMEOUT_S = 300.0


def lacks_model(run_dir: RunDir, ending: Ending | None) -> bool:
    """Return whether the server lacks the model of a run that has finished with ``ending``."""
    return ending is not None and ending.status == "FINISHED" and read_cursor(run_dir).model_at != ending.time


def upload_model(
    run_dir: RunDir,
    backend: TrackingBackend,
    ending: Ending,
    *,
    secrets: Sequence[str] = (),
    import_paths: Sequence[str] = (),
    lock_timeout_s: float = 0.0,
) -> None:
    """Export the final model of a run and upload it, unless the run has been resumed meanwhile.

    Args:
        run_dir: the run, closed on the server.
        backend: the server.
        ending: how the run ended.
        secrets: texts to mask in what is uploaded.
        import_paths: where the job's class is found, besides ``sys.path`` of a new process.
        lock_timeout_s: the longest wait for another upload of the run.

    Raises:
        Exception: whatever the backend raised.
        subprocess.SubprocessError: the export failed, or took longer than ``EXPORT_TIMEOUT_S``.
    """
    with tempfile.TemporaryDirectory(prefix="model-") as parent:
        folder = Path(parent) / "model"
        _export(run_dir, folder, import_paths)
        with exclusive(run_dir, timeout_s=lock_timeout_s) as acquired:
            if acquired and final_ending(run_dir) == ending:
                Transfer(run_dir, backend, secrets=secrets).push_model(folder, ending)


def _export(run_dir: RunDir, folder: Path, import_paths: Sequence[str]) -> None:
    path = os.pathsep.join([*import_paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [sys.executable, "-m", "orchestrator.export", str(run_dir.path), str(folder)],
        check=True,
        timeout=EXPORT_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )
