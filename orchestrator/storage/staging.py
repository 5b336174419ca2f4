"""The local directory that stands for one on a store: a node writes there, and the files are copied from there."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

_ROOT = 0


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
