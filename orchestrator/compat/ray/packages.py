"""The packages of code that travel to the nodes of a cluster."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.compat.ray.internals import Internal, find_internal
from orchestrator.compat.ray.process import ray_logs_errors_only

PIN_S = 600
"""How long the cluster keeps an uploaded package that no job refers to."""


def packaged_files(directory: Path) -> list[tuple[Path, int]]:
    """Return the files of a working directory that would travel to a cluster, relative to it, with their sizes."""
    files: list[tuple[Path, int]] = []

    def note(path: Path) -> None:
        if path.is_file():
            files.append((path.relative_to(directory), path.stat().st_size))

    with ray_logs_errors_only():
        find_internal(Internal.WALK_PACKAGE)(directory, [], note, include_gitignore=_respects_gitignore())
    return files


def make_package(source: Path, package: Path, *, with_name: bool = False) -> Path:
    """Zip a directory, without the files that ``.rayignore`` and ``.gitignore`` name, or a single file.

    ``with_name``: the paths in the zip begin with the name of the directory. Returns ``package``.
    """
    with ray_logs_errors_only():
        find_internal(Internal.CREATE_PACKAGE)(
            str(source),
            package,
            include_gitignore=_respects_gitignore(),
            include_parent_dir=with_name,
            excludes=find_internal(Internal.NEVER_PACKAGED)(),
        )
    return package


def upload_package(package: Path) -> str:
    """Bring a zip or a wheel to the connected cluster if it is not there, and keep it there for :data:`PIN_S`.

    Returns:
        The URI, for a runtime environment.
    """
    uri: str = find_internal(Internal.PACKAGE_URI)(package)
    with ray_logs_errors_only():
        find_internal(Internal.PIN_PACKAGE)(uri, expiration_s=PIN_S)
        if not find_internal(Internal.PACKAGE_EXISTS)(uri):
            find_internal(Internal.UPLOAD_PACKAGE)(uri, package.read_bytes())
    return uri


def _respects_gitignore() -> bool:
    return os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"


def max_package_bytes() -> int:
    """Return the size of the largest working directory that Ray sends to a cluster."""
    return int(find_internal(Internal.MAX_PACKAGE_BYTES))
