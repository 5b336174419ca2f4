"""The local directory of a run on a store, where a driver and workers write: what is there when they come to it."""

from __future__ import annotations

import glob
import shutil
import socket
import uuid

from orchestrator.records.json_file import write_json
from orchestrator.records.lock import locked
from orchestrator.records.output_dir import OutputDir, name_of
from orchestrator.records.process_identity import is_alive, is_visible
from orchestrator.records.run_dir import RunDir
from orchestrator.storage.mirror import NOT_COPIED, make_private


def prepare(run_dir: RunDir) -> None:
    """Create the directory here of a run on a store, for a driver or a worker of it.

    It is emptied if an earlier driver of the run has written its records there and is seen to be dead. Nothing else is
    removed: workers of a driver elsewhere write no record, and may be training.

    Raises:
        OSError: it cannot be created, or another user could replace it.
    """
    above = OutputDir.containing(run_dir).path
    make_private(above)
    with locked(above / ".lock"):
        try:
            driver = run_dir.read_driver()
        except ValueError:
            driver = {}
        if is_visible(driver) and not is_alive(driver):
            run_dir.path.rename(run_dir.path.with_name(f".{run_dir.path.name}.{uuid.uuid4().hex}"))
        for folder in (run_dir.logs, run_dir.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
    # Takes long if there are large checkpoints. A process that was killed here has left some of them.
    for removed in run_dir.path.parent.glob(f".{glob.escape(run_dir.path.name)}.*"):
        shutil.rmtree(removed, ignore_errors=True)


def folder_of_node(run_dir: RunDir) -> str:
    """Return the folder in ``logs/`` on the store for the logs in the directory here, if the driver has another one.

    It has an id of this directory: logs in a new one must not replace those that an earlier one has left.
    """
    file = run_dir.path / ".staging-id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:8])
    return f"{socket.gethostname()}-{file.read_text()}"


def take_over(run_dir: RunDir) -> RunDir:
    """Return the directory from which this process may drive a run that nobody drives. To be called under the lock.

    Args:
        run_dir: the run with its records and the checkpoint to continue from, as it was found.

    Raises:
        OSError: the directory cannot be written.
    """
    output, name = OutputDir.containing(run_dir), name_of(run_dir)
    staged = output.staged(name)
    if run_dir.remote is None or run_dir.path == staged.path:
        return staged
    prepare(staged)
    of_node = folder_of_node(staged)
    if not staged.record_file.exists() and any(staged.logs.iterdir()):
        # Of workers of the driver before, which was elsewhere: keep them where the upload of this node has put them.
        aside = staged.path / f".{of_node}"
        staged.logs.rename(aside)
        staged.logs.mkdir()
        aside.rename(staged.logs / of_node)
    others = shutil.ignore_patterns(of_node, ".*", *NOT_COPIED)
    shutil.copytree(run_dir.path, staged.path, ignore=others, dirs_exist_ok=True)
    for checkpoint in run_dir.checkpoints.iterdir():
        if not (there := staged.checkpoints / checkpoint.name).exists():
            checkpoint.rename(there)
    return staged


def announce(run_dir: RunDir) -> None:
    """Put the record of a run, which names this process as its driver, on the store. To be called under the lock.

    Raises:
        OSError: the store cannot be used, or the directory cannot be written.
    """
    if run_dir.remote is None:
        return
    for file in (run_dir.config_file, run_dir.record_file):
        run_dir.remote.put(file, file.name)
    write_json(run_dir.origin_file, run_dir.read_record()["driver"])
