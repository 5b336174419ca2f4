"""The final model and the dataset of a run that has finished, for a server.

A process of its own exports them, within a limited time: that takes seconds, and imports large libraries and the job.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from orchestrator.features.tracking.mlflow import MlflowBackend
from orchestrator.features.tracking.transfer import Transfer, read_cursor
from orchestrator.records.ended_runs import exclusive, final_ending
from orchestrator.records.journal import Ending
from orchestrator.records.run_dir import RunDir

EXPORT_TIMEOUT_S = 300.0
_MODULE = "orchestrator.features.export"


def missing_exports(run_dir: RunDir, ending: Ending, *, log_model: bool, log_dataset: bool) -> list[str]:
    """Return what the server lacks of ``model`` and ``dataset``; nothing if the run has not finished.

    Args:
        run_dir: the run, closed on the server.
        ending: how the run ended.
        log_model: whether the server is to have the model.
        log_dataset: whether the server is to have the dataset.
    """
    if ending.status != "FINISHED" or read_cursor(run_dir).model_at == ending.time:
        return []
    return [name for name, is_chosen in (("model", log_model), ("dataset", log_dataset)) if is_chosen]


def upload_exports(
    exports: Sequence[str],
    run_dir: RunDir,
    backend: MlflowBackend,
    ending: Ending,
    *,
    import_paths: Sequence[str] = (),
    secrets: Sequence[str] = (),
    lock_timeout_s: float = 0.0,
) -> None:
    """Export what :func:`missing_exports` has returned and upload it, unless the run has been resumed meanwhile.

    Args:
        run_dir: the run, closed on the server.
        ending: how the run ended.
        import_paths: where the job's class is found, besides ``sys.path`` of a new process.
        secrets: texts to mask in what is uploaded.
        lock_timeout_s: the longest wait for another upload of the run.

    Raises:
        Exception: whatever the backend raised.
        subprocess.TimeoutExpired: the process took longer than :data:`EXPORT_TIMEOUT_S`.
        RuntimeError: the process failed.
    """
    path = os.pathsep.join([*import_paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="export-") as parent:
        folder, errors = Path(parent) / "exported", Path(parent) / "errors"
        with errors.open("w") as stderr:  # not a pipe, which a child of the job's code may keep open
            exported = subprocess.run(
                [sys.executable, "-m", _MODULE, str(run_dir.path), str(folder), *exports],
                check=False,
                timeout=EXPORT_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            )
        if exported.returncode:
            (*_, why) = errors.read_text(errors="replace").strip().splitlines() or ["no message"]
            raise RuntimeError(f"exit code {exported.returncode} of {_MODULE}: {why}")
        with exclusive(run_dir, timeout_s=lock_timeout_s) as acquired:
            if acquired and final_ending(run_dir) == ending:
                Transfer(run_dir, backend, secrets=secrets).push_model(folder, ending)
