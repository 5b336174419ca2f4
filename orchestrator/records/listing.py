"""What directories contain, while other processes may remove it: ``Path.glob`` raises then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def files_below(folder: Path) -> Iterator[Path]:
    """Yield every file below ``folder``, without what vanishes meanwhile."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent) / name for name in names)


def folders_in(folder: Path) -> list[Path]:
    """Return the folders in ``folder``; none if it has vanished, or if this process may not list it."""
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
