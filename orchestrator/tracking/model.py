"""The final model and the dataset of a run: exported by a process of its own after the run has ended, then uploaded."""

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


def exports_of(*, log_model: bool, log_dataset: bool) -> tuple[str, ...]:
    """Return what to export, as ``orchestrator.export`` names it."""
    chosen = {"model": log_model, "dataset": log_dataset}
    return tuple(name for name, is_chosen in chosen.items() if is_chosen)


def lacks_model(run_dir: RunDir, ending: Ending | None) -> bool:
    """Return whether the server lacks the model, or the dataset, of a run that has finished with ``ending``."""
    return ending is not None and ending.status == "FINISHED" and read_cursor(run_dir).model_at != ending.time


def upload_model(
    run_dir: RunDir,
    backend: TrackingBackend,
    ending: Ending,
    exports: Sequence[str],
    *,
    secrets: Sequence[str] = (),
    import_paths: Sequence[str] = (),
    lock_timeout_s: float = 0.0,
) -> None:
    """Export the final model and the dataset of a run and upload them, unless the run has been resumed meanwhile.

    Args:
        run_dir: the run, closed on the server.
        backend: the server.
        ending: how the run ended.
        exports: what :func:`exports_of` returned.
        secrets: texts to mask in what is uploaded.
        import_paths: where the job's class is found, besides ``sys.path`` of a new process.
        lock_timeout_s: the longest wait for another upload of the run.

    Raises:
        Exception: whatever the backend raised.
        subprocess.SubprocessError: the export failed, or took longer than ``EXPORT_TIMEOUT_S``.
    """
    with tempfile.TemporaryDirectory(prefix="model-") as parent:
        folder = Path(parent) / "model"
        _export(run_dir, folder, exports, import_paths)
        with exclusive(run_dir, timeout_s=lock_timeout_s) as acquired:
            if acquired and final_ending(run_dir) == ending:
                Transfer(run_dir, backend, secrets=secrets).push_model(folder, ending)


def _export(run_dir: RunDir, folder: Path, exports: Sequence[str], import_paths: Sequence[str]) -> None:
    path = os.pathsep.join([*import_paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [sys.executable, "-m", "orchestrator.export", str(run_dir.path), str(folder), *exports],
        check=True,
        timeout=EXPORT_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )
