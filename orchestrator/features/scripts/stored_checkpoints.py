"""The checkpoints of a script on the store of its run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from orchestrator.records.json_file import read_json, write_json
from orchestrator.records.lock import locked
from orchestrator.records.run_dir import RunDir

Version = list[int]
"""Size and time of change of a file here."""


class StoredCheckpoints:
    """The directory ``script_checkpoints`` of a run, and the same on its store. All ranks of a node use it.

    A hidden file beside it has the version of each file that equals the one on the store, and when that one was written
    there. What is deleted here stays on the store, because others than the script may have emptied the directory.

    Args:
        run_dir: the run, which is on a store.
        timeout_s: how long to wait for another rank of the node.

    All methods raise :class:`~orchestrator.storage.remote.StorageError` if the store cannot be used.
    """

    def __init__(self, run_dir: RunDir, *, timeout_s: float):
        assert run_dir.remote is not None
        self._here = run_dir.script_checkpoints
        self._there = run_dir.remote.child(self._here.name)
        self._known = run_dir.path / f".{self._here.name}.json"
        self._lock = run_dir.path / f".{self._here.name}.lock"
        self._timeout_s = timeout_s

    def fetch(self, on_progress: Callable[[], None]) -> None:
        """Bring here what is newer on the store. A file that has changed here since it was equal stays."""
        with locked(self._lock, timeout_s=self._timeout_s):
            known = read_json(self._known)
            for name, written_at in self._stored().items():
                here = self._version(name)
                equal, stored_at = known.get(name, (None, None))
                if here == equal and (here is None or written_at != stored_at):
                    self._there.fetch(name, self._here / name, on_progress=on_progress)
                    known[name] = (self._version(name), written_at)
            write_json(self._known, known)

    def upload(self) -> None:
        """Copy what has changed here to the store, the oldest change first: a file may name those written before it."""
        with locked(self._lock, timeout_s=self._timeout_s):
            known = read_json(self._known)
            files = {str(path.relative_to(self._here)): path for path in self._here.rglob("*") if path.is_file()}
            found = {name: version for name in files if (version := self._version(name)) is not None}
            changed = {name: v for name, v in found.items() if v != known.get(name, (None, None))[0]}
            for name in sorted(changed, key=lambda name: changed[name][1]):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    self._there.put(files[name], name)
                    known[name] = (changed[name], None)
            if changed:
                stored = self._stored()
                known |= {name: (known[name][0], stored.get(name)) for name in changed if name in known}
                write_json(self._known, known)

    def _stored(self) -> dict[str, float | None]:
        """Return when each file was written to the store, without names that lead out of the directory."""
        root = self._here.resolve()
        entries = [entry for entry in self._there.list(recursive=True) if entry.is_file]
        return {e.name: e.changed_at for e in entries if (self._here / e.name).resolve().is_relative_to(root)}

    def _version(self, name: str) -> Version | None:
        try:
            found = (self._here / name).stat()
        except FileNotFoundError:
            return None
        return [found.st_size, found.st_mtime_ns]


def upload_until(ended: threading.Event, stored: StoredCheckpoints, every_s: float) -> None:
    """Upload what changes every ``every_s`` seconds, until ``ended``."""
    while not ended.wait(every_s):
        with contextlib.suppress(OSError):  # tried again
            stored.upload()
