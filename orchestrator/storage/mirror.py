"""The local directory that stands for one on a store, and a thread that uploads its changes."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.storage.remote import Remote, StorageError

_ROOT = 0
LOGS = "logs"
MAX_PAUSE_S = 30.0
RETRY_AT_END_S = 1.0
_IDLE_SHARE = 20.0
"""A file that changes all the time is copied for at most this part of the time."""
NOT_COPIED = ("checkpoints", "script-checkpoints", "lease", "fence", "stop")
"""What others write to the store, in its own way."""
Version = tuple[int, int]
"""Size and time of change of a file."""


def staging_path(url: str, staging_dir: str | None) -> Path:
    """Return the directory that stages ``url``, the same for each process of a user.

    Args:
        url: the directory on the store.
        staging_dir: where to put it; None for a directory below the one for temporary files.
    """
    base = Path(tempfile.gettempdir()) / f"orchestrator-{os.getuid()}" if staging_dir is None else Path(staging_dir)
    parts = urlsplit(url)
    readable = re.sub(r"[^A-Za-z0-9]+", "-", f"{parts.scheme}-{parts.hostname or ''}{parts.path}").strip("-")
    return base.expanduser().absolute() / f"{readable[:80]}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def make_private(path: Path) -> None:
    """Create a staging directory that only this user can enter.

    Raises:
        OSError: it cannot be created, or another user could replace it.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    for directory, owners in ((path, (os.getuid(),)), (path.parent, (os.getuid(), _ROOT))):
        if directory.stat().st_uid not in owners:
            raise PermissionError(
                f"{directory} belongs to another user; set storage.staging_dir to a directory of your own"
            )


class Mirror:
    """Copies the files of the run directory ``source`` to ``remote`` whenever they have changed, except checkpoints.

    Hidden files, and what others write to the store, are left out. A store that is away is tried again.

    Args:
        remote: the directory on the store.
        every_s: seconds between two rounds.
        masked: copies a log with its secrets masked; the result says whether there was any.
        admitted: whether this process may write to ``remote``; after a False, nothing is copied any more.
        place: where a file goes, by its name relative to ``source``; None for one that is not copied.
    """

    def __init__(
        self,
        source: Path,
        remote: Remote,
        *,
        every_s: float,
        masked: Callable[[Path, Path], bool],
        admitted: Callable[[], bool] = lambda: True,
        place: Callable[[str], str | None] = lambda name: name,
    ):
        self._source = source
        self._remote = remote
        self._every_s = every_s
        self._masked = masked
        self._admitted = admitted
        self._place = place
        self._copied: dict[str, Version] = {}
        self._due: dict[str, float] = {}
        self._problem: str | None = None
        self._ending = threading.Event()
        self._deadline = 0.0
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def problem(self) -> str | None:
        """Return why the last round failed, None if it did not."""
        return self._problem

    def finish(self, timeout_s: float) -> list[str]:
        """Copy what is left, for at most ``timeout_s``, and end.

        Returns:
            The names of the files that differ on the store.
        """
        self._deadline = time.monotonic() + timeout_s
        self._ending.set()
        self._thread.join(timeout_s)
        return sorted(self._changed())

    def _work(self) -> None:
        pause_s = self._every_s
        while not self._ending.wait(pause_s):
            pause_s = self._every_s if self._round(everything=False) else min(2 * pause_s, MAX_PAUSE_S)
        while not self._round(everything=True) and time.monotonic() < self._deadline:
            time.sleep(RETRY_AT_END_S)

    def _round(self, *, everything: bool) -> bool:
        """Copy the files that are due, or ``everything`` that has changed. Return whether that succeeded."""
        problem = None
        try:
            if not self._admitted():
                return True
            for name, version in self._changed().items():
                began = time.monotonic()
                if everything or began >= self._due.get(name, began):
                    if (unreadable := self._copy(name)) is None:
                        self._copied[name] = version
                    problem = unreadable or problem
                    now = time.monotonic()
                    self._due[name] = now + _IDLE_SHARE * (now - began)
        except (StorageError, ValueError) as e:  # ValueError: from ``admitted``
            problem = str(e)
        self._problem = problem
        return problem is None

    def _copy(self, name: str) -> str | None:
        """Copy a file. Return None, or why it cannot be read.

        Raises:
            StorageError: the store cannot be used.
        """
        source, target = self._source / name, self._place(name)
        assert target is not None
        try:
            if not name.startswith(f"{LOGS}/"):
                self._remote.put(source, target)
                return None
            with tempfile.NamedTemporaryFile(prefix=".masked-", dir=self._source) as clean:
                self._masked(source, Path(clean.name))
                self._remote.put(Path(clean.name), target)
        except StorageError:
            raise
        except OSError as e:
            return f"{source}: {e.strerror}" if source.exists() else None
        return None

    def _changed(self) -> dict[str, Version]:
        found = _versions(self._source)
        return {n: version for n, version in found if self._place(n) is not None and self._copied.get(n) != version}


def _versions(root: Path) -> Iterator[tuple[str, Version]]:
    """Yield the name and version of each file to copy below ``root``."""
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders[:] = [f for f in sorted(folders) if not f.startswith(".") and not (here == root and f in NOT_COPIED)]
        for name in sorted(files):
            if name.startswith(".") or name.endswith(".lock") or (here == root and name in NOT_COPIED):
                continue
            try:
                found = (here / name).stat()
            except FileNotFoundError:
                continue
            yield str((here / name).relative_to(root)), (found.st_size, found.st_mtime_ns)
