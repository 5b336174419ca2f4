"""Which version of the code runs: the facts of its git repository."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "ORCHESTRATOR_GIT"
"""Carries the facts to where the code has no repository, such as the directory of a submitted job."""
_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class GitFacts:
    """The commit of a directory.

    Attributes:
        dirty: whether files of the commit have been changed.
    """

    commit: str
    branch: str
    dirty: bool


def git_facts(directory: Path) -> GitFacts | None:
    """Return the facts of the code in ``directory``; None without a repository, or if git is missing or slow.

    A submitted job has the facts of the directory that it came from.
    """
    try:
        if carried := os.environ.get(VARIABLE):
            return GitFacts(**json.loads(carried))
        commit, branch = _git(directory, "rev-parse", "HEAD", "--abbrev-ref", "HEAD").splitlines()
        changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return None
    return GitFacts(commit=commit, branch=branch, dirty=bool(changes))


def name_in_repository(file: Path) -> str | None:
    """Return the path of ``file`` in the repository that tracks it, None if none does."""
    try:
        return _git(file.parent, "ls-files", "--error-unmatch", "--full-name", "--", file.name)
    except (OSError, subprocess.SubprocessError):
        return None


def carried(facts: GitFacts | None) -> Mapping[str, str]:
    """Return the environment variable that carries ``facts`` to a job; nothing if there are none."""
    return {} if facts is None else {VARIABLE: json.dumps(asdict(facts))}


def _git(directory: Path, *words: str) -> str:
    # Without optional locks, because a `git status` that is ended at the timeout would leave one.
    command = ["git", "--no-optional-locks", "-C", str(directory), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    return done.stdout.strip()
