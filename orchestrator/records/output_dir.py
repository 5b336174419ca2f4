"""Where runs are: a directory, or a URL with a local directory that stages it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from orchestrator.records import run_dir as rundir
from orchestrator.records.json_file import write_json
from orchestrator.records.lock import locked
from orchestrator.records.run_dir import ACTIVE_STATES, RunDir
from orchestrator.storage.claim import claimed
from orchestrator.storage.remote import Remote, is_url
from orchestrator.storage.staging import make_private, staging_path

DEFAULT_TIMEOUT_S = 30.0
"""For commands that read a run without its configuration."""


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
        return cls(run_dir.path.parents[1], None if run_dir.remote is None else run_dir.remote.split(2)[0])

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
        return locked(self.path / ".lock") if self.remote is None else claimed(self.remote)

    def create(self, name: str) -> RunDir:
        """Create an empty run directory. To be called under the lock.

        Raises:
            OSError: the directory cannot be created.
        """
        while True:
            created = rundir.create(self.path, name)
            if self.remote is None:
                return created
            run_dir = self._run(_name_of(created))
            assert run_dir.remote is not None
            if not run_dir.remote.list():
                return run_dir
            # Another host has created a run of this name in this second: its directory stays, so that the next differs.

    def runs(self) -> Iterator[RunDir]:
        """Yield every run, the newest first, with its present record.

        Raises:
            StorageError: the store cannot be used.
        """
        if self.remote is None:
            yield from rundir.all_runs(self.path)
            return
        days = [entry.name for entry in self.remote.list() if not entry.is_file and entry.name[:1].isdecimal()]
        for day in sorted(days, reverse=True):
            names = [entry.name for entry in self.remote.list(day) if not entry.is_file]
            for name in sorted(names, reverse=True):
                if (run_dir := self.find(f"{day}/{name}")) is not None:
                    yield run_dir

    def runs_from_here(self) -> Iterator[RunDir]:
        """Yield every run; on a store, only those whose last driver wrote to the directory here and has died."""
        for run_dir in rundir.all_runs(self.path):
            if self.remote is None:
                yield run_dir
            elif _is_orphan(staged := self._run(_name_of(run_dir))):
                yield staged

    def find(self, name: str) -> RunDir | None:
        """Return the run ``<date>/<time>-<name>`` with its present record; None if there is none.

        Raises:
            StorageError: the store cannot be used.
        """
        run_dir = self._run(name)
        if run_dir.remote is not None:
            make_private(self.path)
        return run_dir if refresh(run_dir) else None

    def _run(self, name: str) -> RunDir:
        remote = None if self.remote is None else self.remote.child(name)
        return RunDir((self.path / name).resolve(), remote)


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


def refresh(run_dir: RunDir) -> bool:
    """Bring the record and the age of the lease here, unless the last driver of the run wrote this directory.

    Returns:
        Whether there is such a run.

    Raises:
        StorageError: the store cannot be used.
    """
    remote = run_dir.remote
    if remote is None:
        return run_dir.record_file.is_file()
    try:
        record = json.loads(remote.read(run_dir.record_file.name))
    except FileNotFoundError:
        return False
    except ValueError:
        record = {}  # damaged: the reader of the copy says so
    driver = record.get("driver", {})
    if run_dir.is_original(driver):
        return True
    with contextlib.suppress(ValueError):
        if run_dir.read_record().get("driver", {}) != driver:
            shutil.rmtree(run_dir.path, ignore_errors=True)
    remote.fetch(run_dir.record_file.name, run_dir.record_file)
    age_s = remote.age_s(run_dir.record_file.name)
    with contextlib.suppress(FileNotFoundError):
        age_s = min(age_s, remote.age_s(run_dir.lease_file.name))
    run_dir.lease_file.touch()
    for file in (run_dir.record_file, run_dir.lease_file):
        changed_at = time.time() - age_s
        os.utime(file, (changed_at, changed_at))
    return True


def fetch(run_dir: RunDir, names: Collection[str] | None = None) -> None:
    """Bring the files of a run here that it has on a store. :func:`refresh` comes first.

    Args:
        run_dir: the run.
        names: the files and folders to bring; None for all except checkpoints.

    Raises:
        StorageError: the store cannot be used.
    """
    if run_dir.remote is None or run_dir.is_original(run_dir.read_record().get("driver", {})):
        return
    others = (run_dir.record_file, run_dir.lease_file, run_dir.fence_file, run_dir.stop_file, run_dir.checkpoints)
    not_fetched = {path.name for path in others}
    for top in run_dir.remote.list():
        if top.name in not_fetched or top.name.startswith(".") or (names is not None and top.name not in names):
            continue
        below = [top.name] if top.is_file else _files(run_dir.remote.child(top.name), top.name)
        for name in below:
            run_dir.remote.fetch(name, run_dir.path / name)


def take_over(run_dir: RunDir) -> None:
    """Make this process the one that writes the run to the store, with its record first. To be called under the lock.

    Raises:
        OSError: the store cannot be used, or the directory cannot be written.
    """
    if run_dir.remote is None:
        return
    for folder in (run_dir.log_file(0).parent, run_dir.checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    driver = run_dir.read_record()["driver"]
    for file in (run_dir.config_file, run_dir.record_file):
        run_dir.remote.put(file, file.name)
    write_json(run_dir.origin_file, driver)


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
    """Copy what is known about a run that nobody drives to the store that has it.

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
        return refresh(run_dir) and run_dir.is_original(run_dir.read_record().get("driver", {}))
    except (OSError, ValueError):  # an unreadable run is left alone
        return False


def _files(remote: Remote, folder: str) -> list[str]:
    return [f"{folder}/{e.name}" for e in remote.list(recursive=True) if e.is_file]


def _name_of(run_dir: RunDir) -> str:
    return "/".join(run_dir.path.parts[-2:])
