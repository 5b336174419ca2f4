"""Where the code of a job comes from: its file, its commit, and who runs it."""

from __future__ import annotations

import getpass
import inspect
import subprocess
from pathlib import Path

from orchestrator.job import Job

_GIT_TIMEOUT_S = 2.0


def source_of(job: Job) -> dict[str, str]:
    """Return the origin of the code of ``job``, under MLflow's names without their prefix ``mlflow.``.

    Git's values are left out if no commit has the job's file, or if git is missing or slow.
    """
    target = f"{type(job).__module__}.{type(job).__qualname__}"
    found = {"user": _user(), "source.type": "LOCAL", "source.name": target}
    try:
        file = Path(inspect.getfile(type(job))).resolve()
    except (OSError, TypeError):  # a class of a notebook or of standard input
        return found
    try:
        name = _git(file.parent, "ls-files", "--error-unmatch", "--full-name", "--", file.name)
        commit, branch = _git(file.parent, "rev-parse", "HEAD", "--abbrev-ref", "HEAD").splitlines()
        changes = _git(file.parent, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return found
    return {
        **found,
        "source.name": name,
        "source.git.commit": commit,
        "source.git.branch": branch,
        "source.git.dirty": str(bool(changes)).lower(),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    return done.stdout.strip()
