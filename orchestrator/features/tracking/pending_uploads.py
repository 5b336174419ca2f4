"""The runs of which a tracking server may lack something: a file for each, below the output directory.

A look at them costs the list of one directory, which is empty unless a run trains or an upload did not end.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from orchestrator.records.lock import locked_if_free
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import RunDir

_FOLDER = ".uploads"
_LOCK = ".uploads.lock"


def note_pending(run_dir: RunDir) -> None:
    """Note that a server may lack something of a run, until :func:`clear_pending`. Disk errors are ignored."""
    note = _note(run_dir)
    with contextlib.suppress(OSError):
        note.parent.mkdir(exist_ok=True)
        note.touch()


def clear_pending(run_dir: RunDir) -> None:
    """Note that a server has everything of a run. Disk errors are ignored."""
    with contextlib.suppress(OSError):
        _note(run_dir).unlink(missing_ok=True)


def pending_runs(output: OutputDir) -> list[RunDir]:
    """Return the runs of this machine in ``output`` of which a server may lack something, the newest first."""
    try:
        notes = sorted((output.path / _FOLDER).iterdir(), reverse=True)
    except OSError:
        return []
    runs = []
    for note in notes:
        day, _, name = note.name.partition(".")
        run_dir = output.staged(f"{day}/{name}")
        if run_dir.path.is_dir():
            runs.append(run_dir)
        else:
            clear_pending(run_dir)
    return runs


def alone_in_retrying(run_dir: RunDir) -> contextlib.AbstractContextManager[bool]:
    """Yield whether no other process repeats failed uploads of runs in the output directory of ``run_dir``.

    One is enough to see that a server is back, and each takes the memory of MLflow.
    """
    return locked_if_free(run_dir.path.parents[1] / _LOCK)


def _note(run_dir: RunDir) -> Path:
    day, name = run_dir.path.parts[-2:]
    return run_dir.path.parents[1] / _FOLDER / f"{day}.{name}"
