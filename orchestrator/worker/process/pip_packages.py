"""Packages that pip installs on a node for the workers of a run, beside the environment that Ray runs in.

Ray's own plugin copies that environment, with torch, on each node. Here a virtual environment only refers to it.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from orchestrator.records.lock import locked
from orchestrator.storage.mirror import make_private

_COMPLETE = "complete"


class InstallError(RuntimeError):
    """pip has failed; the text says where and why, in one line."""


def use(requirements: Sequence[str], *, timeout_s: float) -> None:
    """Install ``requirements``, unless that has been done on this node, and let this process import them.

    They come before what was installed already, and after the code of the user.

    Raises:
        InstallError: pip fails, or does not end within ``timeout_s``.
    """
    if not requirements:
        return
    key = hashlib.sha256("\n".join([sys.prefix, sys.version, *requirements]).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"orchestrator-{os.getuid()}" / f"pip-{key}"
    make_private(folder)
    with locked(folder / "lock", timeout_s=timeout_s):
        if not (folder / _COMPLETE).exists():
            _install(requirements, folder / "venv", timeout_s=timeout_s)
            (folder / _COMPLETE).touch()
    added = str(_site_packages(folder / "venv"))
    if added not in sys.path:
        sys.path.insert(next((i for i, path in enumerate(sys.path) if _is_installed(path)), len(sys.path)), added)


def _install(requirements: Sequence[str], venv: Path, *, timeout_s: float) -> None:
    _run([sys.executable, "-m", "venv", "--clear", "--without-pip", "--system-site-packages", venv], timeout_s)
    site_packages = _site_packages(venv)
    own = [path for path in sys.path if _is_installed(path)]
    (site_packages / "of_ray.pth").write_text("".join(f"{path}\n" for path in own))
    listed = venv / "requirements.txt"
    listed.write_text("".join(f"{line}\n" for line in requirements))
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        venv / "bin" / "python",
        "--disable-pip-version-check",
    ]
    _run([*pip, "install", "--quiet", "-r", listed], timeout_s)


def _site_packages(venv: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(venv), "platbase": str(venv)}))


def _is_installed(path: str) -> bool:
    return Path(path).name in ("site-packages", "dist-packages")


def _run(command: Sequence[str | Path], timeout_s: float) -> None:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise InstallError(_explained(f"not within {timeout_s:g} s (cluster.start_timeout_s)")) from None
    if done.returncode:
        raise InstallError(_explained(_last_line(done.stdout)))


def _explained(why: str) -> str:
    return f"cluster.pip cannot be installed on {socket.gethostname()}: {why}"


def _last_line(output: str) -> str:
    """The last error in what pip has printed, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "no message")
