"""What a server gets of a run that has ended, beside its journal: pictures, the final model and the dataset.

A process of its own makes each, within a limited time: that takes seconds, and imports large libraries or the job.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.records.journal import Ending
from orchestrator.records.run_dir import RunDir
from orchestrator.tracking.backend import TrackingBackend
from orchestrator.tracking.transfer import Transfer, exclusive, final_ending, read_cursor

DRAWING_TIMEOUT_S = 120.0
EXPORT_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Something that a process makes of a run.

    Attributes:
        name: what it is, for messages.
        module: what the process runs, with the directory of the run as the first argument.
        arguments: returns the other arguments, given the path of a new folder.
        environment: the environment of the process, where it differs from that of this one.
        timeout_s: the longest time of the process.
        push: uploads what the process has made, given that folder.
    """

    name: str
    module: str
    arguments: Callable[[Path], Sequence[str]] = lambda folder: ()
    environment: Mapping[str, str]
    timeout_s: float
    push: Callable[[Transfer, Path, Ending], None]


def missing_extras(
    run_dir: RunDir, ending: Ending, *, log_model: bool, log_dataset: bool, import_paths: Sequence[str] = ()
) -> list[Extra]:
    """Return what the server lacks of a run; the model and the dataset belong to one that has finished.

    Args:
        run_dir: the run, closed on the server.
        ending: how the run ended.
        log_model: whether the server is to have the model.
        log_dataset: whether the server is to have the dataset.
        import_paths: where the job's class is found, besides ``sys.path`` of a new process.
    """
    cursor = read_cursor(run_dir)
    found = []
    if cursor.plots_at != ending.time:
        found.append(_PICTURES)
    exports = [name for name, is_chosen in (("model", log_model), ("dataset", log_dataset)) if is_chosen]
    if exports and ending.status == "FINISHED" and cursor.model_at != ending.time:
        found.append(_export(exports, import_paths))
    return found


def upload_extra(
    extra: Extra,
    run_dir: RunDir,
    backend: TrackingBackend,
    ending: Ending,
    *,
    secrets: Sequence[str] = (),
    lock_timeout_s: float = 0.0,
) -> None:
    """Make ``extra`` and upload it, unless the run has been resumed meanwhile.

    Args:
        extra: what to make.
        run_dir: the run, closed on the server.
        backend: the server.
        ending: how the run ended.
        secrets: texts to mask in what is uploaded.
        lock_timeout_s: the longest wait for another upload of the run.

    Raises:
        Exception: whatever the backend raised.
        subprocess.TimeoutExpired: the process took longer than its ``timeout_s``.
        RuntimeError: the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="extra-") as parent:
        folder, errors = Path(parent) / "made", Path(parent) / "errors"
        with errors.open("w") as stderr:  # not a pipe, which a child of the job's code may keep open
            made = subprocess.run(
                [sys.executable, "-m", extra.module, str(run_dir.path), *extra.arguments(folder)],
                check=False,
                timeout=extra.timeout_s,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, **extra.environment},
            )
        if made.returncode:
            (*_, why) = errors.read_text(errors="replace").strip().splitlines() or ["no message"]
            raise RuntimeError(f"exit code {made.returncode} of {extra.module}: {why}")
        with exclusive(run_dir, timeout_s=lock_timeout_s) as acquired:
            if acquired and final_ending(run_dir) == ending:
                extra.push(Transfer(run_dir, backend, secrets=secrets), folder, ending)


_PICTURES = Extra(
    name="pictures",
    module="orchestrator.display.run_pictures",
    environment={},
    timeout_s=DRAWING_TIMEOUT_S,
    push=lambda transfer, folder, ending: transfer.push_plots(ending),
)


def _export(exports: Sequence[str], import_paths: Sequence[str]) -> Extra:
    path = os.pathsep.join([*import_paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return Extra(
        name=" and ".join(exports),
        module="orchestrator.exporting",
        arguments=lambda folder: [str(folder), *exports],
        environment={"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        timeout_s=EXPORT_TIMEOUT_S,
        push=Transfer.push_model,
    )
