"""Where runs are: a directory, or a URL with a local directory that stages it.

Drivers and workers write to the staging directory, from which their files go to the store. Readers keep copies in a
folder of their own there, so that they never change what a run is writing. :func:`prepare_staging` makes that directory
ready for a driver or a worker, whatever is there when they come to it.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.records import run_dir as rundir
from orchestrator.records.json_file import write_atomically, write_json
from orchestrator.records.lock import is_alive, is_visible, locked
from orchestrator.records.run_dir import ACTIVE_STATES, RunDir
from orchestrator.storage.mirror import NOT_COPIED, make_private, staging_path
from orchestrator.storage.remote import Remote, is_url, store_locked

DEFAULT_TIMEOUT_S = 30.0
"""For commands that read a run without its configuration."""
_COPIES = ".copies"
"""The folder with the copies of readers."""
_AT_ONCE = 16
"""The number of requests to a store at once."""


@dataclass(frozen=True)
class OutputDir:
    """The directory ``output_dir`` of runs. ``path`` stages it if it is the URL ``remote``."""

    path: Path
    remote: Remote | None = None

    @classmethod
    def of(cls, text: str, *, staging_dir: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> OutputDir:
        """Return the output directory at a path or URL."""
        if not is_url(text):
            return cls(Path(text))
        url = text.rstrip("/")
        return cls(staging_path(url, staging_dir), Remote(url, timeout_s))

    @classmethod
    def containing(cls, run_dir: RunDir) -> OutputDir:
        """Return the output directory in which a run is."""
        path = run_dir.path.parents[1]
        if run_dir.remote is None:
            return cls(path)
        return cls(path.parent if path.name == _COPIES else path, run_dir.remote.split(2)[0])

    def __str__(self) -> str:
        return str(self.path if self.remote is None else self.remote)

    def prepare(self) -> None:
        """Create the local directory.

        Raises:
            OSError: it cannot be created.
        """
        if self.remote is None:
            self.path.mkdir(parents=True, exist_ok=True)
        else:
            make_private(self.path)

    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock under which runs start.

        Raises:
            OSError: others have held it for too long, or it cannot be taken.
        """
        return locked(self.path / ".lock") if self.remote is None else store_locked(self.remote)

    def create(self, name: str) -> RunDir:
        """Create an empty run directory. To be called under the lock.

        Raises:
            OSError: the directory cannot be created.
        """
        while True:
            created = rundir.create(self.path, name)
            if self.remote is None:
                return created
            run_dir = self.staged(name_of(created))
            assert run_dir.remote is not None
            if not run_dir.remote.list():
                return run_dir
            # Another host has created a run of this name in this second: its directory stays, so that the next differs.

    def names(self, run_name: str | None = None) -> list[str]:
        """Return what the directories of runs are called, ``<date>/<time>-<name>``, the newest first.

        On a store, some may have no record, and those that a run called ``run_name`` cannot have are left out.

        Raises:
            StorageError: the store cannot be used.
        """
        if self.remote is None:
            return [name_of(run_dir) for run_dir in rundir.all_runs(self.path)]
        remote = self.remote
        days = [entry.name for entry in remote.list() if not entry.is_file and entry.name[:1].isdecimal()]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            entries = zip(days, pool.map(remote.list, days), strict=True)
        names = sorted((f"{day}/{e.name}" for day, found in entries for e in found if not e.is_file), reverse=True)
        if run_name is None:
            return names
        directory = re.compile(rf".*/\d\d-\d\d-\d\d-{re.escape(run_name)}(-\d+)?")
        return [name for name in names if directory.fullmatch(name)]

    def runs(self, names: Collection[str] | None = None) -> Iterator[RunDir]:
        """Yield the runs in the directories ``names``, in their order; every run, the newest first, if it is None.

        Each has its present record. On a store, records are read as the caller goes on, more and more at once.

        Raises:
            StorageError: the store cannot be used.
        """
        if self.remote is None:
            yield from rundir.all_runs(self.path) if names is None else filter(None, map(self.find, names))
            return
        left, number = list(self.names() if names is None else names), 1
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            while left:
                yield from filter(None, pool.map(self.find, left[:number]))
                left, number = left[number:], min(2 * number, _AT_ONCE)

    def runs_from_here(self) -> Iterator[RunDir]:
        """Yield every run; on a store, only those whose last driver wrote to the directory here and has died."""
        for run_dir in rundir.all_runs(self.path):
            if self.remote is None:
                yield run_dir
            elif _is_orphan(staged := self.staged(name_of(run_dir))):
                yield staged

    def find(self, name: str) -> RunDir | None:
        """Return the run ``<date>/<time>-<name>`` with its present record; None if there is none.

        Raises:
            StorageError: the store cannot be used.
        """
        return refresh(self.staged(name))

    def staged(self, name: str) -> RunDir:
        """Return the directory here in which a driver or a worker of the run ``name`` writes."""
        return self._run(self.path / name, name)

    def copy(self, name: str) -> RunDir:
        """Return the directory here for what readers fetch of the run ``name``."""
        return self._run(self.path / _COPIES / name, name)

    def _run(self, path: Path, name: str) -> RunDir:
        return RunDir(path.resolve(), None if self.remote is None else self.remote.child(name))


def name_of(run_dir: RunDir) -> str:
    """Return ``<date>/<time>-<name>`` of a run."""
    return "/".join(run_dir.path.parts[-2:])


def find_run(text: str) -> RunDir | None:
    """Return the run at a path or URL, with its present record; None if there is none.

    Raises:
        StorageError: the store cannot be used.
    """
    if is_url(text):
        output, name = split_run(text)
        return output.find(name)
    run_dir = RunDir(Path(text).resolve())
    return run_dir if run_dir.record_file.is_file() else None


def staged_run(path: Path) -> RunDir:
    """Return the run in the directory ``path``, with the store that it stages if its record names one.

    Raises:
        ValueError: the record is damaged.
    """
    run_dir = RunDir(path)
    location = str(run_dir.read_record().get("location", ""))
    return RunDir(path, Remote(location, DEFAULT_TIMEOUT_S)) if is_url(location) else run_dir


def split_run(
    url: str, *, staging_dir: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> tuple[OutputDir, str]:
    """Return the output directory of the run at ``url``, and the name of the run there."""
    above, name = Remote(url.rstrip("/"), timeout_s).split(2)
    return OutputDir.of(above.url, staging_dir=staging_dir, timeout_s=timeout_s), name


def refresh(run_dir: RunDir) -> RunDir | None:
    """Return a run with its present record, and the age of the lease if that decides whether the run has a driver.

    This is the directory that the last driver of the run has written here, otherwise a copy of the one on the store.
    None if there is no such run.

    Raises:
        StorageError: the store cannot be used.
    """
    remote = run_dir.remote
    if remote is None:
        return run_dir if run_dir.record_file.is_file() else None
    try:
        text = remote.read(run_dir.record_file.name)
    except FileNotFoundError:
        return None
    record: dict[str, Any] = {}
    with contextlib.suppress(ValueError, TypeError):  # damaged: the reader of the copy says so
        record = dict(json.loads(text))
    output, name, driver = OutputDir.containing(run_dir), name_of(run_dir), record.get("driver", {})
    staged, copy = output.staged(name), output.copy(name)
    if staged.is_original(driver):
        return staged
    make_private(output.path)
    copy.path.mkdir(parents=True, exist_ok=True)
    write_atomically(copy.record_file, text)
    if record.get("state") in ACTIVE_STATES and not is_visible(driver):
        files = (copy.record_file, copy.lease_file)
        changed_at = time.time() - remote.age_s(*(file.name for file in files))
        copy.lease_file.touch()
        for file in files:
            os.utime(file, (changed_at, changed_at))
    return copy


def is_present(run_dir: RunDir) -> bool:
    """Return whether a run exists and its last driver has written this directory; on a store, it may be another one.

    Raises:
        StorageError: the store cannot be used.
    """
    return (present := refresh(run_dir)) is not None and present.path == run_dir.path


def fetch(run_dir: RunDir, names: Collection[str] | None = None) -> None:
    """Bring the files of a run here that it has on a store. :func:`refresh` comes first.

    Args:
        names: the files and folders to bring; None for all except checkpoints.

    Raises:
        StorageError: the store cannot be used.
    """
    if run_dir.remote is None or run_dir.is_original(run_dir.read_driver()):
        return
    not_fetched = (run_dir.record_file.name, *NOT_COPIED)
    for top in run_dir.remote.list():
        if top.name in not_fetched or top.name.startswith(".") or (names is not None and top.name not in names):
            continue
        inside = [] if top.is_file else run_dir.remote.child(top.name).list(recursive=True)
        for name in [top.name] if top.is_file else [f"{top.name}/{entry.name}" for entry in inside if entry.is_file]:
            run_dir.remote.fetch(name, run_dir.path / name)


def remove(run_dir: RunDir) -> None:
    """Delete a run that has ended, here and on the store.

    Raises:
        StorageError: the store cannot be used.
    """
    shutil.rmtree(run_dir.path, ignore_errors=True)
    if run_dir.remote is not None:
        above, name = run_dir.remote.split(1)
        above.delete_directory(name)


def push_records(run_dir: RunDir) -> None:
    """Copy the local records of a run that nobody drives to its store.

    Raises:
        StorageError: the store cannot be used.
    """
    if run_dir.remote is None:
        return
    for file in (run_dir.events_file, run_dir.metrics_file, run_dir.tracking_file, run_dir.record_file):
        if file.is_file():
            run_dir.remote.put(file, file.name)


def _is_orphan(run_dir: RunDir) -> bool:
    try:
        if run_dir.read_record().get("state") not in ACTIVE_STATES or run_dir.driver_if_running():
            return False
        return is_present(run_dir)
    except (OSError, ValueError):  # an unreadable run is left alone
        return False


def prepare_staging(run_dir: RunDir) -> None:
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
    prepare_staging(staged)
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
