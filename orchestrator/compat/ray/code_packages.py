"""The packages of code that travel to the nodes of a cluster."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from orchestrator.compat.ray.internals import Internal, find_internal
from orchestrator.compat.ray.side_effects import ray_logs_errors_only

PIN_S = 600
"""How long the cluster keeps an uploaded package that no job refers to."""
_ENTRY_BYTES = 100
"""At least what a file takes in a zip beside its content and its name, which is there twice."""


def never_packaged() -> list[str]:
    """Return the names that Ray leaves out of a working directory, such as ``.git`` and ``__pycache__``."""
    names: list[str] = find_internal(Internal.NEVER_PACKAGED)()
    return names


def packaged_files(source: Path) -> list[tuple[Path, int]]:
    """Return the files of a directory that would travel to a cluster, relative to it, or the single file ``source``.

    Each with the bytes that it takes in the package, which is not compressed.
    """
    files: list[tuple[Path, int]] = []

    def note(path: Path) -> None:
        if path.is_file():
            name = path.relative_to(source.parent if path == source else source)
            files.append((name, path.stat().st_size + _ENTRY_BYTES + 2 * len(str(name).encode())))

    excluded = find_internal(Internal.MATCH_EXCLUDED)(source, never_packaged())
    with ray_logs_errors_only():
        find_internal(Internal.WALK_PACKAGE)(source, [excluded], note, include_gitignore=_respects_gitignore())
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
            excludes=never_packaged(),
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


def upload_file(client: Any, file: Path) -> str:
    """Bring a single Python file to a cluster for a job, because Ray's client uploads only directories and wheels.

    ``client``: a :class:`ray.job_submission.JobSubmissionClient`.

    Returns:
        The URI, for ``py_modules``.
    """
    with tempfile.TemporaryDirectory(prefix="orchestrator-code-") as folder:
        package = make_package(file, Path(folder) / "module.zip")
        upload = find_internal(Internal.UPLOAD_TO_DASHBOARD)
        uri: str = upload(client, str(package), include_gitignore=False, is_file=True)
    return uri


def _respects_gitignore() -> bool:
    return os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"


def max_package_bytes() -> int:
    """Return the size that a package of a driver on the cluster has to stay below."""
    return int(find_internal(Internal.MAX_PACKAGE_BYTES))


def max_upload_bytes() -> int:
    """Return the size that a package which goes through Ray's dashboard, as for a job, has to stay below."""
    return min(int(find_internal(Internal.MAX_UPLOAD_BYTES)), max_package_bytes())
